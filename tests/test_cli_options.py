"""Options of one meaning have one help and one default, and few stand before the groups."""

from collections import defaultdict

from test_cli_main import every_command

OPTIONS_BEFORE_GROUPS = 12
# Where an option of this name is about something else, and what.
OTHER_MEANINGS = {
    "--also": {"fit": "profiles", "capacity": "changes of the recipe"},
    "--api-key": {"serve": "clients must send it"},
    "--duration": {"bench": "of a replay", "trace convert": "of a part"},
    "--fit": {"capacity": "repeatable"},
    "--force": {"render": "a plan that breaks limits, files that were changed"},
    "--gpu": {"recipe new": "required"},
    "--host": {"trace record": "no recipe has it"},
    "--insecure": {"trace record": "it has no keys"},
    "--live": {"tune": "the URL of a server", "serve": "a switch"},
    "--load": {"bench": "of what the machine can now"},
    "--model": {"bench": "its name in the API"},
    "--policies": {
        "tune": "are searched",
        "simulate": "are simulated, in place of the recipe's",
        "capacity": "stand beside the recipe's",
    },
    "--port": {"trace record": "no recipe has it"},
    "--rate": {
        "simulate": "several",
        "capacity": "the wanted one",
        "trace convert": "is written to a file",
        "trace generate": "is drawn",
    },
    "--routers": {
        "tune": "are searched",
        "simulate": "are simulated, in place of the recipe's",
        "capacity": "stand beside the recipe's",
    },
    "--seed": {
        "bench": "of prompts, which no two runs share",
        "trace convert": "of times",
        "trace generate": "of lengths and times",
    },
    "--templates": {"trace generate": "a number of prompts' beginnings"},
    "--trace": {
        "recipe new": "its limits become the recipe's",
        "render": "what the tuning was about",
        **dict.fromkeys(
            ("recipe from-command", "recipe from-values", "recipe from-compose",
             "recipe from-manifest"),
            "becomes the recipe's",
        ),
    },
    "--trials": {"autoscale": "of each rule"},
    "--tuning": {
        "capacity": "one of several settings",
        "bench": "a window of its trace",
    },
    "--url": {"bench": "any server", "set": "a server with live settings"},
}  # fmt: skip
OWN_FILE = "--out"  # each command writes another file


def meanings() -> dict[str, dict[str, tuple[object, ...]]]:
    """Of each option the help and the default, by the commands that have it."""
    found: dict[str, dict[str, tuple[object, ...]]] = defaultdict(dict)
    for name, command in every_command():
        for one in command.params:
            if one.param_type_name == "option":
                found[one.opts[0]][name] = (one.help, one.default, one.envvar)
    del found[OWN_FILE]
    return found


def test_an_option_of_one_meaning_has_one_help_and_one_default() -> None:
    differ = {}
    for option, by_command in meanings().items():
        same = {
            command: meaning
            for command, meaning in by_command.items()
            if command not in OTHER_MEANINGS.get(option, {})
        }
        if len(set(same.values())) > 1:
            differ[option] = same
    assert differ == {}


def test_what_is_said_to_differ_differs() -> None:
    found = meanings()
    for option, commands in OTHER_MEANINGS.items():
        usual = [meaning for name, meaning in found[option].items() if name not in commands]
        for command in commands:
            assert found[option][command] not in usual, (option, command)


def test_few_options_stand_before_the_groups() -> None:
    for name, command in every_command():
        plain = [
            one.opts[0]
            for one in command.params
            if one.param_type_name == "option" and not one.rich_help_panel
        ]
        assert len(plain) <= OPTIONS_BEFORE_GROUPS, (name, plain)
