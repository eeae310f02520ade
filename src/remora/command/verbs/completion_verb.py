"""`remora completion SHELL`: prints a script that teaches a shell the verbs of this command and their options.

The scripts are made from the parsers, so they cannot say anything else than `--help`.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

NAME = "completion"
HELP = "print a script that completes this command: for bash, zsh or fish"
EXAMPLE = "source <(remora completion bash)"


@dataclass(frozen=True, slots=True)
class Word:
    """One option or value, with what it is."""

    text: str
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(MAKERS))


def run(options: argparse.Namespace) -> int:
    print(MAKERS[options.shell]())
    return 0


def verbs() -> dict[str, tuple[str, list[argparse.Action]]]:
    """By verb: what it is for, and its arguments."""
    from remora.command.verbs import VERBS, load, parser_of

    return {name: (load(name).HELP, parser_of(load(name))._actions) for name in VERBS}


def options_of(actions: list[argparse.Action]) -> list[Word]:
    """The options, long and short."""
    return [Word(text, _plain(action.help)) for action in actions for text in action.option_strings]


def values_of(actions: list[argparse.Action]) -> dict[str, list[str]]:
    """By option, and "" for the place of a word that is none: the values that can be chosen."""
    found = {}
    for action in actions:
        if action.choices is not None:
            values = [str(each) for each in action.choices]
            found.update(dict.fromkeys(action.option_strings or [""], values))
    return found


def takes_file(action: argparse.Action) -> bool:
    """True of arguments that name a file."""
    return (action.metavar or "") in ("FILE", "DIR") or action.dest in ("program", "arguments", "file", "output")


def _plain(text: str | None) -> str:
    return (text or "").replace("%%", "%")


def bash() -> str:
    cases = "\n".join(_bash_case(name, actions) for name, (_, actions) in verbs().items())
    return _BASH.replace("VERBS", " ".join(verbs())).replace("CASES", cases)


def _bash_case(verb: str, actions: list[argparse.Action]) -> str:
    """The proposals of bash behind a verb."""
    values = values_of(actions)
    options = " ".join(each.text for each in options_of(actions))
    lines = [f"        {verb})", '            case "$before" in']
    for option, words in values.items():
        lines += [f"                {option}) {_compgen_words(words)}; return ;;"] if option else []
    files = [text for action in actions if takes_file(action) for text in action.option_strings]
    lines += [f"                {'|'.join(files)}) {_COMPGEN_FILES}; return ;;"] if files else []
    names_file = any(takes_file(action) and not action.option_strings for action in actions)
    lines += [
        "            esac",
        '            if [[ "$word" == -* ]]; then',
        f"                {_compgen_words(options.split())}",
        "            else",
        f"                {_COMPGEN_FILES if names_file else _compgen_words(values.get('', []))}",
        "            fi ;;",
    ]
    return "\n".join(lines)


def _compgen_words(words: list[str]) -> str:
    return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$word"))'


_COMPGEN_FILES = 'COMPREPLY=($(compgen -f -- "$word"))'

_BASH = """\
# Completion of remora for bash:  source <(remora completion bash)
_remora() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "VERBS --help --version" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]}" in
CASES
    esac
}
complete -F _remora remora"""


def zsh() -> str:
    cases = []
    for name, (_, actions) in verbs().items():
        specs = [_zsh_spec(action) for action in actions]
        cases.append(f"        {name}) _arguments {' '.join(each for each in specs if each)} ;;")
    described = " ".join(shlex.quote(f"{name}:{help.replace(':', ' -')}") for name, (help, _) in verbs().items())
    return _ZSH.replace("VERBS", described).replace("CASES", "\n".join(cases))


def _zsh_spec(action: argparse.Action) -> str:
    text = _plain(action.help).replace("[", "(").replace("]", ")").replace(":", " -")
    values = f"({' '.join(map(str, action.choices))})" if action.choices else "_files" if takes_file(action) else ""
    if not action.option_strings:
        return shlex.quote(f"*:{action.dest}:{values}")
    rest = "" if action.nargs == 0 else f":{action.metavar or action.dest}:{values}"
    return " ".join(shlex.quote(f"{option}[{text}]{rest}") for option in action.option_strings)


_ZSH = """\
#compdef remora
# Completion of remora for zsh:  source <(remora completion zsh)
_remora() {
    local -a verbs=(VERBS)
    if (( CURRENT == 2 )); then
        _describe verb verbs
        return
    fi
    local verb="${words[2]}"
    shift words
    (( CURRENT-- ))
    case "$verb" in
CASES
    esac
}
compdef _remora remora"""


def fish() -> str:
    lines = ["# Completion of remora for fish:  remora completion fish | source", "complete -c remora -f"]
    for name, (text, actions) in verbs().items():
        lines.append(f"complete -c remora -n __fish_use_subcommand -a {name} -d {_fish(text)}")
        where = f"complete -c remora -n '__fish_seen_subcommand_from {name}'"
        for action in actions:
            values = f" -a {_fish(' '.join(map(str, action.choices)))}" if action.choices else ""
            files = " -F" if takes_file(action) else ""
            if not action.option_strings:
                lines += [f"{where}{values}{files}"] if values or files else []
                continue
            names = "".join(
                f" -l {each[2:]}" if each.startswith("--") else f" -s {each[1:]}" for each in action.option_strings
            )
            wants = "" if action.nargs in (0, "?") else " -r"
            lines.append(f"{where}{names}{wants}{values}{files} -d {_fish(_plain(action.help))}")
    return "\n".join(lines)


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


MAKERS = {"bash": bash, "zsh": zsh, "fish": fish}
