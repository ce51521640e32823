"""Table of docs/reference/recorded-facts.md: what the converter does with every recorded fact.

    python -m tests.docs.recorded_facts

writes the page from the tables of convert/facts.py.
"""

from collections.abc import Iterator
from pathlib import Path

from convert.facts import ANY, COMPARED, MM, NO_EFFECT, OPEN_CLIP, TIMM, TRANSFORMERS
from convert.families.timm import NOT_OF_A_NETWORK
from convert.metadata import USED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "recorded-facts.md"
TEXT = """# Recorded facts

Files say more of their networks than a name: `config.json` of transformers (at its top, or under
`vision_config`, `backbone_config`, `encoder`, `vision_encoder`), `open_clip_config.json`, and the
configuration of OpenMMLab in a checkpoint's `meta`. A recorded fact is like a tensor: the converter
uses it and compares it with the recognized network, or it is known to change no feature, or the
file is refused by its name. What is in no table here is refused, too.

- **used**: it decides what no tensor does, such as the number of attention heads.
- **compared**: it has to agree with the network that the tensors are.
- **no effect**: it changes no feature map that a detector gets.
- –: the file is refused if it has it.

`python -m tests.docs.recorded_facts` writes this page from `convert/facts.py`; a test compares
both, and another one perturbs every key of nine configurations of transformers and every argument
of six networks of timm, and compares with the networks that these build.

"""
TIMM_TEXT = """
## Arguments of timm

The arguments in `model_args` (timm's `config.json`), `args.model_kwargs` and `args.bn_eps` (its
train.py) and `hyper_parameters.model_kwargs` (Lightning) are given to `timm.create_model`, whose
signatures decide which ones there are, and the features are compared with those of that network.

- No effect in eval mode: {no_effect}.
- Never given, and refused if they are set, because they name files or code, or ask for another kind
  of module: {refused}.

## Keys of transformers without effect on any network

{others}. Also all that start with `_`.
"""
_USED_IN = {TRANSFORMERS: set(USED), OPEN_CLIP: {"head_width", "quick_gelu"}, MM: {"style"}}
_OFTEN = {TRANSFORMERS: "transformers", OPEN_CLIP: "open_clip", MM: "OpenMMLab"}


def columns() -> list[tuple[str, str]]:
    """Return the kinds of record and of network."""
    return [(kind, table) for kind, tables in COMPARED.items() for table in tables if table]


def rows() -> Iterator[str]:
    """Yield the lines of the table: a fact each, with what each kind does with it."""
    every = columns()
    heads = [f"{_OFTEN[kind]}: {table}" for kind, table in every]
    yield f"| fact | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(every)}"
    names = {name for tables in COMPARED.values() for table in tables.values() for name in table}
    for name in sorted(names):
        cells = [_cell(kind, table, name) for kind, table in every]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _cell(kind: str, table: str, name: str) -> str:
    facts = {**COMPARED[kind].get("", {}), **COMPARED[kind][table]}
    if name not in facts:
        return "–"
    if facts[name] is ANY:
        return "no effect"
    return "used" if name in _USED_IN[kind] else "compared"


def page() -> str:
    """Return the whole page."""
    parts = {
        "no_effect": NO_EFFECT[TIMM],
        "refused": NOT_OF_A_NETWORK,
        "others": NO_EFFECT[TRANSFORMERS],
    }
    lists = {key: ", ".join(f"`{name}`" for name in sorted(part)) for key, part in parts.items()}
    return TEXT + "\n".join(rows()) + "\n" + TIMM_TEXT.format(**lists)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
