"""The pages of `docs/` that are printed from the code, so that they cannot say anything else."""

from collections.abc import Callable, Mapping
from itertools import groupby

from phalanx.api.documents import DOCUMENTS, legend_of
from phalanx.api.keys import topics
from phalanx.core import glossary, symbols


def keys_page() -> str:
    """Every key of a layout and a run file, as the page `docs/keys.md`."""
    lines = [
        "# Keys of a layout and a run file",
        "",
        "`phalanx help KEY` says the same, with an example.",
        "Written by `python tools/pages.py`; edit the docstrings in `phalanx/core/`.",
    ]
    keys = [topic for topic in topics() if topic.kind.endswith("key")]
    for table, group in groupby(keys, key=lambda topic: topic.name.partition(".")[0]):
        lines += [
            "",
            f"## [{table}]",
            "",
            "| key | meaning | default | values |",
            "|---|---|---|---|",
        ]
        for topic in group:
            values = topic.values if topic.name != "model.name" else "custom, or a catalog name"
            key = f"`{topic.name.partition('.')[2]}`"
            lines.append(f"| {key} | {topic.meaning} | {topic.default} | {values} |")
    return "\n".join(lines) + "\n"


def json_page() -> str:
    """Every document that `--json` prints, as the page `docs/json.md`."""
    lines = [
        "# JSON documents",
        "",
        "Every command takes `--json`: stdout is then one document and nothing else. Results of",
        "functions in Python give the same by `to_dict()`. One quantity has one name in all of",
        "them, and one unit; `[]` after a name is a list, `{}` an object whose keys are data.",
        "A command that fails prints `schema`, `error` and `exit_code`; one whose answer is no, as",
        "`estimate` of a layout that does not fit or `verify` of one that is wrong, its document.",
        "Written by `python tools/pages.py`; edit `phalanx/api/documents.py` and",
        "`phalanx/core/quantities.py`.",
    ]
    for command in DOCUMENTS:
        lines += ["", f"## phalanx {command}", "", "| field | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{path}` | {unit} | {text} |" for path, unit, text in legend_of(command)]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "symbols.md": symbols.to_markdown,
    "glossary.md": glossary.to_markdown,
    "keys.md": keys_page,
    "json.md": json_page,
}
