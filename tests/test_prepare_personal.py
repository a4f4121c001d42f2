"""Addresses of people are replaced, wherever they stand; numbers and names that only look like addresses are not."""

from __future__ import annotations

import random

import pytest
from datatrove.data import Document

from octavo.prepare.personal import EMAIL, IPV4, IPV6, PersonalDataFormatter, scrub


@pytest.mark.parametrize(
    "address",
    [
        "john.doe@mail-server.co.uk",
        "a@b.de",
        "x_1+tag@sub.domain.org",
        "JOHN@EXAMPLECORP.COM",
        "j%d@uni.edu",
        "me@xn--bcher-kva.ch",
    ],
)
@pytest.mark.parametrize(
    "form", ["{}", "<{}>", "Write to {}.", "mailto:{}?x", "a, {}, b", "'{}'", "(={})", "Ä{}\n", "{}\n{}"]
)
def test_emails_are_replaced(address, form):
    text = form.format(address, address).replace("Ä", "Ä ")
    found = scrub(text)
    count = text.count(address)
    assert found == (text.replace(address, EMAIL), count, 0)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "y = x@self.weight",
            "out = a@b.to(device)",
            "@decorator.name",
            "me@example.com",
            "x@mail.example.org",
            "root@localhost",
        ),
        *("git@github.com:a/b.git", "a @ b.com", "@@ -1,2 +3.de", "user@", "@", "price @2.50", "pkg@1.2.3", ".@x.de"),
    ],
)
def test_what_is_no_email_stays(text):
    assert scrub(text) == (text, 0, 0)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.4.130", "223.255.255.1", "45.33.32.156"])
@pytest.mark.parametrize("form", ["{}", "at {}.", "http://{}/x", "{}:80", "({})", "{}/24", '"{}",', "IP={}", "\n{}\n"])
def test_public_ipv4_is_replaced(address, form):
    assert scrub(form.format(address)) == (form.format(IPV4), 0, 1)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "127.0.0.1",
            "10.200.3.4",
            "192.168.100.7",
            "172.16.99.1",
            "169.254.99.1",
            "192.0.2.77",
            "0.0.0.0",
            "255.255.255.0",
        ),
        *("1.2.3.4", "section 20.3.1.12", "8.8.8.8", "version 1.20.33.4", "Version: 99.0.4844.51", "v99.20.48.51"),
        *(
            "lib-1.20.33.40",
            "Chrome/99.0.48.51",
            "1.20.33.4.55",
            "12.1.20.33.4",
            "1.20.33.40-rc1",
            "1.20.33.40b",
            "300.1.2.99",
        ),
        *("release 45.33.32.156", "kernel 5.10.200.99", "224.0.0.251", "01.020.033.044"),
    ],
)
def test_versions_and_private_addresses_stay(text):
    assert scrub(text) == (text, 0, 0)


@pytest.mark.parametrize(
    "address", ["2001:4860:4860::8888", "2606:2800:220:1:248:1893:25c8:1946", "2a00:1450:4001:80b::200e"]
)
@pytest.mark.parametrize("form", ["{}", "[{}]:80", "ip {}, then", "<{}>", "{}.", "{}: x"])
def test_global_ipv6_is_replaced(address, form):
    assert scrub(form.format(address)) == (form.format(IPV6), 0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "::1",
        "fe80::1",
        "fd00::abcd:1",
        "2001:db8::7",
        "std::add",
        "dead::beef",
        "12:30:45",
        "2023:10:11 12:00",
        "3000: text",
        "x2001:4860::1",
    ],
)
def test_other_colons_stay(text):
    assert scrub(text) == (text, 0, 0)


def test_scrubbing_is_done_when_it_is_done():
    text = "a@b.de 45.33.32.156 2606:2800:220:1:248:1893:25c8:1946 " * 3
    once = scrub(text)
    assert (once.emails, once.ip_addresses) == (3, 6)
    assert scrub(once.text) == (once.text, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_formatter_counts_and_does_not_depend_on_the_order(seed):
    rng = random.Random(seed)
    pieces = ["plain words", "mail a@b.de", "c@d.fr and 45.33.32.156", "127.0.0.1"]
    texts = [" ".join(rng.choices(pieces, k=4)) for _ in range(30)]
    step = PersonalDataFormatter()
    documents = list(step.run(iter([Document(text, str(i)) for i, text in enumerate(texts)])))
    assert [document.text for document in documents] == [scrub(text).text for text in texts]
    emails = sum(text.count("@") for text in texts)
    addresses = sum(text.count("45.33.32.156") for text in texts)
    assert step.stats["emails"].total == emails == sum(document.metadata.get("emails", 0) for document in documents)
    assert step.stats["ip_addresses"].total == addresses
