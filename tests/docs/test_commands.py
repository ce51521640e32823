"""Commands, keys, paths and extras in README.md, CONTRIBUTING.md and docs/ exist.

The parser of its own module accepts every command, its config file is found and its keys are known.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS
from benchmarks.suites.suite_file import load_suite
from detection import train_net
from detection.config.task import default_task
from moco import pretrain
from moco.classification import classify
from moco.classification.config import default_cfg, load_classify_cfg
from moco.common import shipped
from moco.common.cfgnode import flatten, load_cfg
from moco.common.errors import UserError
from moco.finetune import FINETUNE
from moco.linear import LINEAR
from moco.pretraining.config import default_cfg as default_pretraining
from moco.pretraining.config import load_pretrain_cfg

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROTOCOLS = {"moco.linear": LINEAR, "moco.finetune": FINETUNE}
# Programs whose arguments are not checked; a page prints the script my_train.
OTHERS = ("pip", "pytest", "mkdocs", "http.server", "my_train")
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.S | re.M)
HEREDOC = re.compile(r"^ *cat > (\S+) <<'END'\n(.*?)^ *END$", re.S | re.M)
COMMAND = re.compile(r"(?:\w+=\S* )*(?:moco-transfer|python|torchrun) .*")
SHELL = re.compile(r"\s(?:\|\|?|&&?|;|>>?|<)\s")  # ends a command


def commands_of(text: str) -> list[str]:
    """Find the commands in code blocks, with continued lines joined, and inline with arguments."""
    blocks = [code for language, code in FENCE.findall(text) if language in ("", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(moco-transfer \w+ [^`…]+)`", FENCE.sub("", text))
    found = [SHELL.split(" ".join(line.split()))[0] for line in [*lines, *inline]]
    return [command for command in found if COMMAND.fullmatch(command)]


def documented() -> list[tuple[str, str]]:
    pages = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    found = [(name, command) for name, text in pages.items() for command in commands_of(text)]
    return list(dict.fromkeys(found))


def target_of(command: str) -> tuple[str, list[str]]:
    """Return the module that a command line runs, and the arguments of that module."""
    words = [w for w in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", w)]
    if "--no-python" in words:  # torchrun's own flags come first
        words = words[words.index("--no-python") + 1 :]
    if words[0] == "moco-transfer":
        if words[1] not in COMMANDS:
            return "benchmarks.__main__", words[1:]
        return COMMANDS[words[1]][0], words[2:]
    at = words.index("-m") + 1 if "-m" in words else 1
    name, rest = words[at].removesuffix(".py").replace("/", "."), words[at + 1 :]
    is_package = (ROOT / name.replace(".", "/")).is_dir()
    return (f"{name}.__main__" if is_package else name), rest


def parse(module: str, args: list[str]) -> None:
    """Parse as the command would: SystemExit for its flags, UserError for files and keys."""
    if module == "moco.pretrain":
        parsed = pretrain.parse_args(args)
        load_pretrain_cfg(parsed.config_file, parsed.opts)
    elif module in PROTOCOLS:
        parsed = classify.parse_args(PROTOCOLS[module], args)
        load_classify_cfg(PROTOCOLS[module].defaults, parsed.config_file, parsed.opts)
    elif module == "detection.train_net":
        parsed = train_net.parse_args(args)
        file = parsed.config_file
        if file is None or file.startswith("COCO-"):  # a model's own file, or one of Detectron2's
            load_cfg(default_task(), None, parsed.opts)
        else:
            load_cfg(default_task(), shipped.resolve(file), parsed.opts)
    else:
        parsed = importlib.import_module(module).build_parser().parse_args(args)
        if module == "benchmarks.run_suite":
            load_suite(shipped.resolve(parsed.suite))


@pytest.mark.parametrize(("page", "command"), documented())
def test_commands_are_accepted(page, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")  # of a checkout
    for name, content in HEREDOC.findall((ROOT / page).read_text()):
        Path(name).write_text(content, encoding="utf-8")
    module, args = target_of(command)
    if module not in OTHERS:
        try:
            parse(module, args)
        except SystemExit as stopped:
            assert not stopped.code, command  # 0 after --help


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("moco-transfer train \\\n  --config-file no_such_task OUTPUT_DIR a", UserError),
        ("torchrun --no-python moco-transfer pretrain DATA.ROTO images", UserError),
        ("A=1 moco-transfer no_such_command", SystemExit),
    ],
)
def test_a_wrong_command_is_noticed(text, error, capsys):
    [command] = commands_of(f"```bash\n{text} | tee log\n```")
    with pytest.raises(error):
        parse(*target_of(command))


OF_THIS_PROJECT = re.compile(
    r"-m ((moco|convert|detection)\b|benchmarks )|(train_net|convert_to_d2)\.py"
)


def test_the_texts_use_the_console_command():
    """`python -m` finds another project's `moco` in a clone of the official MoCo."""
    assert not [pair for pair in documented() if OF_THIS_PROJECT.search(pair[1])]


@pytest.mark.slow
def test_torchrun_starts_this_project_in_a_clone_of_the_official_moco(tmp_path):
    command = next(c for _, c in documented() if c.startswith("torchrun "))
    for folder in ("moco", "detection", "bin"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('of the clone')")
    console = tmp_path / "bin" / "moco-transfer"
    console.write_text(f"#!{sys.executable}\nfrom benchmarks.__main__ import cli\ncli()\n")
    console.chmod(0o755)
    words = shlex.split(re.sub(r"(--nproc-per-node) \d+", r"\1 1 --standalone", command))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:], "--help"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PATH": f"{console.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("usage: moco-transfer "), done.stderr


def test_what_the_texts_name_exists():
    protocols = [default_cfg(protocol.defaults) for protocol in PROTOCOLS.values()]
    configs = [default_task(), default_pretraining(), *protocols]
    keys = {key for config in configs for key in flatten(config)}
    keys |= {key.rsplit(".", n)[0] for key in keys for n in (1, 2)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tops = "moco|convert|detection|benchmarks|configs|tests|docs"
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        named = set(re.findall(r"`([A-Z][A-Z0-9_]*(?:\.[A-Z][A-Z0-9_]*)+)(?: [^`]*)?`", text))
        assert named <= keys, f"{page.name}: {named - keys}"
        for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", text):
            in_a_wheel = path == "moco/configs/"
            assert in_a_wheel or (ROOT / path).exists(), f"{page.name}: {path}"
        for extras in re.findall(r"pip install .*?[\w.]\[([a-z,-]+)\]", page.read_text()):
            unknown = set(extras.split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"{page.name}: {unknown}"
