"""Text to train on, from raw sources: steps for datatrove's executors that read, judge and clean documents (`octavo[data]`).

The order below is the order to run them in: cheap and general first, so that the costly steps see less. Every step works on
datatrove's `Document`: `text`, `id`, and `metadata` with "source" (name of the source), "kind" ("prose", "code", "dialogue" or
"reference"), "path" (where from) and "record" (number within the file). A step depends on the document alone, never on the
documents before it, so the output is the same whatever the number of tasks.

`readers.SourceReader(source: readers.Source, cache: Path | None = None, exclusion_writer=None)`
    rejects `empty`, `binary`, `encoding`, `damaged`, `not_json`, `no_text`, `too_long`, `generated`, `minified`, `unreadable`
`language.LanguageFilter(languages=("en",), threshold=0.65, kinds=("prose", "dialogue", "reference"), exclusion_writer=None)`
    rejects `language_<code>`, `language_unsure`
`quality.QualityFilter(rules: Mapping[str, QualityRules] | None = None, exclusion_writer=None)`
    rejects `few_words`, `many_words`, `short_words`, `long_words`, `symbols`, `bullets`, `ellipses`, `few_letters`,
    `few_stop_words`
`code.CodeFilter(rules: CodeRules | None = None, exclusion_writer=None)`
    rejects `few_lines`, `long_line`, `long_lines`, `alphanumeric`, `few_letters`, `no_keyword`
`repetition.RepetitionFilter(rules: Mapping[str, RepetitionRules] | None = None, exclusion_writer=None)`
    rejects `duplicate_paragraphs`, `duplicate_paragraph_characters`, `duplicate_lines`, `duplicate_line_characters`,
    `top_<n>_gram`, `duplicate_<n>_grams`
`perplexity.PerplexityFilter(model: Path, quantile=0.95, kinds=("prose",), exclusion_writer=None)`
    rejects `perplexity`
`classifier.ClassifierFilter(model: Path, quantile=0.05, kinds=("prose",), exclusion_writer=None)`
    rejects `unlike_reference`
`contamination.ContaminationFilter(index: Path, exclusion_writer=None)`
    rejects `contaminated_<task>`
`personal.PersonalDataFormatter()`
    rejects nothing: it replaces; counts in `metadata["emails"]` and `metadata["ip_addresses"]`, and as statistics of these names

A reader's `exclusion_writer` gets one document for each file or record that could not be read, with the beginning of its text
where there is one; "path", "record" and "detail" in its metadata say which and why. Statistics: each reader counts
`skipped_<reason>`, each filter `dropped_<reason>`, as datatrove does.

What is made before the pipeline runs (each raises `ValueError` in one sentence when its input does not do):

`readers.Source(name, kind="prose", paths=(), debian=(), pypi=(), include=(), exclude=(), text_field=None,
max_characters=2_000_000, split_characters=None)`
    what to read; checked at once
`SourceReader(...).units`
    the list of pieces of work; task `rank` of `world_size` does `units[rank::world_size]`
`readers.nothing_read(source: Source, skipped: Mapping[str, int]) -> ValueError`
    what to raise for a source of which all tasks together read no document
`perplexity.train_perplexity(documents: Iterable[str], out: Path) -> dict`
    n-gram model and reference quantiles in the folder `out`
`classifier.train_classifier(positives: Iterable[str], negatives: Iterable[str], out: Path) -> dict`
    linear model and reference quantiles in the folder `out`
`contamination.build_index(tasks: Path, out: Path, n: int = 13) -> dict`
    sorted hashes of the evaluation items in the folder `out`

This module imports nothing: the steps need datatrove, and the light parts of octavo must do without it.
"""
