"""Fails on phrases that stop a native reader, with what to write instead. Run by `make lint`.

Owns the list of phrases. Every tracked page, TOML file and Makefile is checked; of code, comments, docstrings and text
literals are. Generated pages are checked where their words are written. It must never match an identifier. Only the
Makefile and tests/unit/test_check_words.py use it.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

EXEMPT: Final = (
    "docs/check_words.py",
    "tests/unit/test_check_words.py",
    "smq/clients/pb/",
)  # these quote, or are generated
_GENERATED_PAGE: Final = re.compile(r"^# [^\n]+\n\n+Generated (?:by|from) ")  # its words are checked in its generator
_CODE_BYTE: Final = "\0"  # stands for code, so that no phrase is found across it
_CODE: Final = re.compile(rf"{_CODE_BYTE}[{_CODE_BYTE}\s]*{_CODE_BYTE}")
_PROSE_TOKENS: Final = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    example: str
    pattern: str
    instead: str
    case_matters: bool = False
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flags = re.NOFLAG if self.case_matters else re.IGNORECASE
        object.__setattr__(self, "regex", re.compile(self.pattern.replace(" ", r"\s+"), flags))


_THING: Final = (
    r"(?:fsyncs?|calls?|rounds?|transactions?|lines?|files?|messages?|timers?|commands?|questions?|batch(?:es)?|rows?"
    r"|entry|entries|process(?:es)?|threads?|loops?|checkers?|bytes?|seeds?|records?|offsets?|pieces?)"
)
_UNIT: Final = (
    r"(?:second|minute|hour|round|record|node|batch|partition|request|call|connection|message|group|turn|topic|producer"
    r"|history|row|commit|file|key|process|stream|address|family|run|tick|peer)"
)
_VERB: Final = (
    r"(?:has|had|is|was|does|did|reads|writes|asks|waits|comes|knows|leads|gets|may|must|can|votes|counts|serves|talks"
    r"|speaks|holds|takes|sees|cannot|wants|names|would|says|looks|never)"
)

PHRASES: Final = (
    Phrase(
        example="the node is told",
        pattern=r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)",
        instead="learns, gets or receives; or name the message",
    ),
    Phrase(example="who has told", pattern=r"\b(?:has|have|had) told\b(?! apart)", instead="reported"),
    Phrase(
        example="a log that tells of it",
        pattern=r"\btells? of\b|\btells \w",
        instead="reports, says, shows, distinguishes",
    ),
    Phrase(example="what tells is", pattern=r"\bwhat (?:tells|waits|comes|came|lies)\b", instead="name the noun"),
    Phrase(example="what there is", pattern=r"\bwhat there\b", instead="name the noun"),
    Phrase(
        example="so that, who waits",
        pattern=rf"(?:[,;:(] |[\"']|\b(?:and|what|than|until|of|by|when|if|while) )who {_VERB}\b",
        instead="name the client, node or caller",
    ),
    Phrase(
        example="those who read",
        pattern=r"\b(?:the one|those|one|any|none|others|each|all) who\b",
        instead="name the client, node or caller, with 'that'",
    ),
    Phrase(example="whoever reads", pattern=r"\bwho(?:m)?ever\b", instead="name the client, node or caller"),
    Phrase(example="from whom", pattern=r"\bwhom\b", instead="name the client, node or caller; or 'which'"),
    Phrase(
        example="everybody waits",
        pattern=r"\b(?:every|any|some|no)body\b",
        instead="all members, any client, no node, ...",
    ),
    Phrase(
        example="what he has seen",
        pattern=r"\b(?:[Hh]e|him|his|[Hh]imself)\b",
        instead="it, they, or the noun",
        case_matters=True,
    ),
    Phrase(
        example="where that is not so",
        pattern=(
            r"\bwhere (?:that|this|it) (?:is|was|does|has) not\b"
            r"|\bwhere (?:it|they) (?:cannot|(?:is|are) gone)\b"
            r"|\b(?:where|while|if) (?:that|this) is (?:not )?so\b"
        ),
        instead="if not; otherwise",
    ),
    Phrase(
        example="where there is none",
        pattern=r"\bwhere (?:there (?:is|are|was|were)|none|nothing|nobody)\b",
        instead="if there is no ...",
    ),
    Phrase(
        example="None where it has no key",
        pattern=r"(?:\b(?:None|False|True|nothing|fails?|raises?|only)|Error) where\b",
        instead="if, when",
    ),
    Phrase(
        example="it returns at once", pattern=r"(?<!\ball\s)\bat once\b", instead="immediately; or at the same time"
    ),
    Phrase(example="scenarios by turns", pattern=r"\bby turns\b", instead="in turn, alternately"),
    Phrase(example="it is made anew", pattern=r"(?<![-\w])anew(?![-\w])", instead="again, from the start"),
    Phrase(
        example="a node that is well",
        pattern=r"\b(?:stays?|is|are|been|be|was|were) well\b(?! (?:before|below|above|known|within|under|past)\b)",
        instead="healthy",
    ),
    Phrase(
        example="one fsync a round",
        pattern=rf"\b{_THING} an? {_UNIT}\b",
        instead="per",
    ),
    Phrase(
        example="after so many records",
        pattern=r"\b(?:not|for|about|after|of|than|least|by|were|are) so (?:many|much|long)\b(?! (?:as|that)\b)",
        instead="this many, this long; or the number",
    ),
    Phrase(example="the first, else the last", pattern=r"[,;] else\b(?! \w+ =)", instead="otherwise, or"),
    Phrase(
        example="a record behind the last",
        pattern=rf"\bbehind (?:the|an?) (?:\w+ )?(?:start|end|last|first|header|kill|{_UNIT})\b",
        instead="after",
    ),
    Phrase(
        example="right behind it",
        pattern=r"\b(?:right|comes?|lies?|begins?|fails?|from|bytes) behind\b",
        instead="after, follow",
    ),
    Phrase(example="once in a while", pattern=r"\bonce in a while\b", instead="periodically"),
    Phrase(example="repaired in vain", pattern=r"\bin vain\b", instead="without effect"),
    Phrase(example="the how-manieth", pattern=r"\bhow-manieth\b", instead="its number"),
    Phrase(example="nothing is to be had", pattern=r"\bbe had\b", instead="available"),
    Phrase(example="refused for want of space", pattern=r"\bfor want of\b", instead="for lack of"),
    Phrase(example="some at a time", pattern=r"\bsome (?:at a time|in a turn)\b", instead="a few at a time, in slices"),
    Phrase(example="two are one a node", pattern=r"\bone an? (?:node|row|turn|round)\b", instead="per"),
    Phrase(
        example="all that there is.", pattern=r"\bthat there (?:is|are)\s*[.,;:]", instead="that exists; or the noun"
    ),
    Phrase(example="a node not heard of", pattern=r"\bnot heard of\b", instead="silent"),
    Phrase(example="a node in a hurry", pattern=r"\bhurr(?:y|ies|ied)\b", instead="expedite, quickly"),
    Phrase(example="a batch is mended", pattern=r"\bmend(?:s|ed|ing)?\b", instead="repair, fix"),
    Phrase(example="one and the same", pattern=r"\bone and the same\b", instead="the same"),
    Phrase(example="it comes to nothing", pattern=r"\bc(?:omes?|ame) to nothing\b", instead="fails"),
    Phrase(
        example="what became of it", pattern=r"\b(?:became|become|came) of (?:it|them|the|one)\b", instead="outcome"
    ),
    Phrase(example="gives up what it leads", pattern=r"\bwhat (?:it|they) leads?\b", instead="its leaderships"),
    Phrase(example="it is its own doing", pattern=r"\b(?:whose|own) doing\b", instead="name the cause"),
    Phrase(example="the cost per se", pattern=r"\bper se\b", instead="by itself"),
)


def findings(text: str, *, is_code: bool) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, what to write instead) of each bad phrase."""
    prose = _prose(text) if is_code else text
    if _GENERATED_PAGE.match(prose):
        return
    short = _CODE.sub(_CODE_BYTE, prose)  # more than half of all text is code, which takes most of the time
    for phrase in PHRASES:
        for match in phrase.regex.finditer(prose) if phrase.regex.search(short) else ():
            yield text.count("\n", 0, match.start()) + 1, " ".join(match.group().split()), phrase.instead


def _prose(source: str) -> str:
    """The source with all code blotted out: comments and strings stay where they are."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    blotted = [character if character.isspace() else _CODE_BYTE for character in source]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _PROSE_TOKENS:
            start = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            text = source[start:end]
            blotted[start:end] = " " + text[1:] if token.type == tokenize.COMMENT else text
    return "".join(blotted)


def is_checked(name: str) -> bool:
    return name.endswith((".py", ".md", ".toml", "Makefile")) and not name.startswith(EXEMPT)


def main(names: list[str]) -> int:
    """Checks these files, or every tracked one; 1 if a phrase was found."""
    if not names:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        names = [name for name in listed.split("\0") if name and is_checked(name) and (ROOT / name).is_file()]
    bad = 0
    for name in names:
        for line, phrase, instead in sorted(findings((ROOT / name).read_text("utf-8"), is_code=name.endswith(".py"))):
            sys.stdout.write(f'{name}:{line}: "{phrase}": write: {instead}\n')
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
