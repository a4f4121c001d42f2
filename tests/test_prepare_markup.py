"""A page gives the text that it is about, and none of the menus around it."""

from __future__ import annotations

from octavo.prepare.markup import page_text

LINKS = "".join(f'<li><a href="{i}.html">chapter {i} of the manual</a></li>' for i in range(12))


def text(body, head=""):
    return page_text(f"<html><head>{head}</head><body>{body}</body></html>")


def test_blocks_stand_on_lines_and_pre_keeps_its_form():
    body = "<h1>Title</h1><p>One <b>bold</b>\n line.</p><pre>a\n  b</pre><table><tr><td>x</td><td>y</td></tr></table>"
    assert text(body) == "Title\n\nOne bold line.\n\na\n  b\n\n\tx\ty\n"


def test_scripts_styles_titles_and_comments_are_no_text():
    body = "<script>var a;</script><style>p {}</style><!-- note --><noscript>enable</noscript><p>kept</p>"
    assert text(body, "<title>title</title>") == "kept\n"


def test_navigation_goes_by_tag_role_class_and_id():
    for opening in (
        "<nav>",
        "<aside>",
        "<footer>",
        '<div role="navigation">',
        '<div class="x sphinxsidebar">',
        '<p id="toc">',
    ):
        tag = opening[1:].split(" ")[0].rstrip(">")
        assert text(f"{opening}menu</{tag}><p>The text of the page.</p>") == "The text of the page.\n"
    heading = 'Name<a class="headerlink" href="#name">¶</a>'
    assert text(f"<h2>{heading}</h2><p>text</p>") == "Name\n\ntext\n"


def test_words_that_only_begin_like_navigation_stay():
    assert text(
        '<div class="stock">shares</div><div id="sidebarless-x">menu</div><div class="unnavigated">kept</div>'
    ) == ("shares\n\nkept\n")


def test_only_the_marked_content_is_read():
    assert text("<div>banner text</div><main><p>content</p></main><div>legal notes</div>") == "content\n"
    assert text('<div>banner</div><div role="main">content</div>tail') == "content\n"
    assert (
        text("<article>one</article><article>two</article>") == "one\n\ntwo\n"
    )  # a list of articles is no content alone


def test_lists_of_links_go_and_links_in_sentences_stay():
    sentence = 'See <a href="a">the manual</a>, <a href="b">the guide</a> or <a href="c">the list</a> for more about this matter.'
    assert text(f"<ul>{LINKS}</ul><p>{sentence}</p>") == (
        "See the manual, the guide or the list for more about this matter.\n"
    )
    assert text(f"<ul>{LINKS}</ul>") == ""


def test_broken_markup():
    assert page_text("<p>Größe</p>") == "Größe\n"
    assert page_text("<p>one<p>two<b>three") == "one\n\ntwothree\n"
    assert page_text("") == page_text("<!-- only this -->") == ""
    assert page_text("<div>" * 3000 + "deep" + "</div>" * 3000) in ("deep\n", "")
