"""Personal data: e-mail addresses and IP addresses are replaced by ones that belong to nobody.

The replacements are those that the Internet's standards keep for documentation (RFC 2606, 5737, 3849), so the text still reads as
text: `name@example.com`, `192.0.2.1`, `2001:db8::1`. What is replaced:

- an e-mail address: a local part of letters, digits and `._+%-`, "@", and a domain that ends in a country's two letters or in one
  of the `GENERIC` labels, so that the matrix product `x@self.weight` is none. `git@` and addresses at example.com, .org, .net,
  .edu are nobody's and stay, as do hosts without such an end (`root@localhost`).
- an IPv4 address that is public: private, loopback, link-local, documentation and other reserved ranges stay. Four numbers with
  dots are a version and no address, and stay, if they are part of a longer name or number (`lib-1.20.33.4`, `v99.0.4844.51`,
  `Chrome/99.0.4844.51`, `1.20.33.4.5`, `1.20.33.4-rc1`), if a word such as "version" or "release" precedes them, or if all four
  are below 32, as in the numbers of releases and sections. The last rule misses one public address in 4,000.
- an IPv6 address that is global unicast: 2000::/3, so its first group has four digits; `std::add` or `a::b` are none.

datatrove's PIIFormatter takes turns among several replacements, so what it writes depends on the documents before; and it
replaces version numbers and leaves IPv6 alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import NamedTuple

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

EMAIL = "name@example.com"
IPV4 = "192.0.2.1"
IPV6 = "2001:db8::1"

LOCAL = 64
"""Longest local part of an address (RFC 5321)."""
GENERIC = (
    "com org net edu gov mil int info biz name pro aero coop museum mobi jobs travel arpa xyz online site shop store tech cloud "
    "digital email live life world blog news agency company solutions services studio design media network systems"
)
LOCAL_PART = re.compile(r"(?<![\w.+%-])\w(?:[\w.+%-]*[\w+-])?\Z", re.ASCII)
DOMAIN = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+"
    rf"(?:[a-z]{{2}}|{'|'.join(GENERIC.split())}|dev|app|xn--[a-z0-9-]{{1,59}})(?![\w(-]|\.\w)",
    re.IGNORECASE,
)
NOBODY = re.compile(r"(?:.*\.)?example\.(?:com|org|net|edu)", re.IGNORECASE)
FOUR_NUMBERS = re.compile(r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?!\d)")
JOINED_BEFORE = re.compile(
    r"[\w.-]\Z|[^/\s]/\Z|\b(?:versions?|ver|releases?|rel|rev|revision|firmware|build|kernel|section|§)\W{0,3}\Z",
    re.IGNORECASE,
)
JOINED_AFTER = re.compile(r"\.\d|[\w-]")
GROUPS = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{0,33}(?:[0-9A-Fa-f]|::)(?!\w|[.:]\w)")
SMALL = 32


class Scrubbed(NamedTuple):
    """A text without personal data, and how much of it there was."""

    text: str
    emails: int
    ip_addresses: int


class PersonalDataFormatter(PipelineStep):
    """Replaces e-mail and public IP addresses; counts them as statistics and as "emails", "ip_addresses" of the metadata."""

    type = "✂️ - FORMAT"
    name = "personal data"

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in data:
            self.stat_update("total")
            with self.track_time():
                scrubbed = scrub(document.text)
                document.text = scrubbed.text
                for name, count in (("emails", scrubbed.emails), ("ip_addresses", scrubbed.ip_addresses)):
                    if count:
                        document.metadata[name] = count
                        self.stat_update(name, value=count)
            yield document


def scrub(text: str) -> Scrubbed:
    """`text` with its addresses replaced, and how many they were."""
    text, emails = _scrub_emails(text)
    text, old = _replace(FOUR_NUMBERS, _is_public_ipv4, IPV4, text) if "." in text else (text, 0)
    text, new = _replace(GROUPS, _is_public_ipv6, IPV6, text) if ":" in text else (text, 0)
    return Scrubbed(text, emails, old + new)


def _scrub_emails(text: str) -> tuple[str, int]:
    """Looks around each "@": a pattern that looks for local parts everywhere takes a hundred times as long."""
    parts: list[str] = []
    done = 0
    at = text.find("@")
    while at >= 0:
        begin = max(done, at - LOCAL)
        domain = DOMAIN.match(text, at + 1)
        local = LOCAL_PART.search(text[begin:at]) if domain else None
        if domain and local and local.group() != "git" and not NOBODY.fullmatch(domain.group()):
            parts += [text[done : begin + local.start()], EMAIL]
            done = domain.end()
        at = text.find("@", at + 1)
    return ("".join([*parts, text[done:]]), len(parts) // 2) if parts else (text, 0)


def _replace(pattern: re.Pattern[str], wanted: Callable[[re.Match[str]], bool], new: str, text: str) -> tuple[str, int]:
    parts: list[str] = []
    done = 0
    for match in pattern.finditer(text):
        if wanted(match):
            parts += [text[done : match.start()], new]
            done = match.end()
    return ("".join([*parts, text[done:]]), len(parts) // 2) if parts else (text, 0)


def _is_public_ipv4(match: re.Match[str]) -> bool:
    text, start = match.string, match.start()
    try:
        address = ipaddress.IPv4Address(match.group())
    except ValueError:
        return False
    if not address.is_global or address.is_multicast or max(address.packed) < SMALL:
        return False
    return not JOINED_BEFORE.search(text[max(0, start - 16) : start]) and not JOINED_AFTER.match(text, match.end())


def _is_public_ipv6(match: re.Match[str]) -> bool:
    try:
        return ipaddress.IPv6Address(match.group()).is_global
    except ValueError:
        return False
