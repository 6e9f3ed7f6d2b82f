"""The state of the page: what was changed, as a URL has it. Everything else follows from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from phalanx.core.errors import UsageError
from phalanx.explore.inputs import BY_KEY, Value, default_of, nudged, read_value, show_plain
from phalanx.explore.presets import chip_facts, model_facts

VERSION = "1"
LONGEST = 8000  # characters of a query
FOLLOWS = {"model": model_facts, "chip": chip_facts}  # what a new choice brings its own values for


@dataclass(frozen=True)
class State:
    """What was changed; all other inputs have their defaults.

    Attributes:
        chosen: values that differ from the default, by key.
        unknown: keys of the URL that nobody knows, kept and shown.
        problems: values that could not be read, in words.
    """

    chosen: Mapping[str, Value] = field(default_factory=dict)
    unknown: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Value:
        """The value of an input."""
        if key in self.chosen:
            return self.chosen[key]
        if key in FOLLOWS:
            return BY_KEY[key].default
        return default_of(key, str(self["model"]), str(self["chip"]))

    def query(self) -> str:
        """The state as the query of a URL: only what differs from the default.

        Example:
            >>> State.parse("v1&tp=16&D=16384").query()
            'v1&tp=16'
        """
        pairs = [(key, show_plain(self[key])) for key in BY_KEY if key in self.chosen]
        text = urlencode([*pairs, *self.unknown])
        return f"v{VERSION}&{text}" if text else ""

    @classmethod
    def parse(cls, query: str) -> "State":
        """Read the query of a URL. What cannot be read is a problem, not an error.

        Args:
            query: as the address bar has it, without the question mark.
        """
        if len(query) > LONGEST:
            return cls(problems=(f"the address has {len(query)} characters; at most {LONGEST}",))
        pairs = parse_qsl(query, keep_blank_values=True)
        problems = [
            f"the link is of version {key[1:]}; this page reads version {VERSION}"
            for key, text in pairs
            if key[:1] == "v" and key[1:].isdigit() and not text and key[1:] != VERSION
        ]
        pairs = [(k, t) for k, t in pairs if not (k[:1] == "v" and k[1:].isdigit() and not t)]
        values: dict[str, Value] = {}
        for key, text in pairs:
            if key not in BY_KEY:
                continue
            try:
                values[key] = read_value(BY_KEY[key], text)
            except UsageError as error:
                problems.append(str(error))
        unknown = tuple((key, text) for key, text in pairs if key not in BY_KEY)
        return cls(_differing(values), unknown, tuple(problems))

    def set(self, values: Mapping[str, Value]) -> "State":
        """The state with other values; a new model or chip brings its own sizes or rates.

        Args:
            values: by key.
        """
        kept = dict(self.chosen)
        for key, facts in FOLLOWS.items():
            if key in values and values[key] != self[key]:
                for follower in facts(str(values[key])):
                    kept.pop(follower, None)
        return State(_differing({**kept, **values}), self.unknown, ())

    def typed(self, key: str, text: str) -> "State":
        """The state after somebody typed a value; what cannot be read is a problem.

        Args:
            key: of the input.
            text: as it was typed.
        """
        try:
            return self.set({key: read_value(BY_KEY[key], text)})
        except UsageError as error:
            return State(self.chosen, self.unknown, (str(error),))

    def moved(self, key: str, steps: int) -> "State":
        """The state with one input some steps further.

        Args:
            key: of the input.
            steps: of its scale.
        """
        return self.set({key: nudged(BY_KEY[key], self[key], steps)})

    def command(self, name: str = "phalanx explore") -> str:
        """The command that opens this page in this state."""
        query = self.query()
        return f"{name} --state '{query}'" if query else name


def _differing(values: Mapping[str, Value]) -> dict[str, Value]:
    """Those that differ from the default, in the order of the schema."""
    model = str(values.get("model", BY_KEY["model"].default))
    chip = str(values.get("chip", BY_KEY["chip"].default))
    return {
        key: values[key]
        for key in BY_KEY
        if key in values
        and values[key] != (BY_KEY[key].default if key in FOLLOWS else default_of(key, model, chip))
    }


class Reading:
    """A state that remembers what was read of it, so that a panel is only computed anew if it must.

    Args:
        state: what is read.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.seen: set[str] = set()

    def number(self, key: str) -> float:
        """A number."""
        self.seen.add(key)
        value = self._state[key]
        assert not isinstance(value, str), f"{key} is a word"
        return value

    def whole(self, key: str) -> int:
        """A whole number."""
        return int(self.number(key))

    def text(self, key: str) -> str:
        """A word or a text."""
        self.seen.add(key)
        return str(self._state[key])

    def shown(self, keys: Iterable[str]) -> str:
        """Some inputs with their values, for a formula with numbers."""
        return ", ".join(f"{BY_KEY[key].label} = {show_plain(self._state[key])}" for key in keys)
