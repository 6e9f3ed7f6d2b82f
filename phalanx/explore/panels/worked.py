"""Part 7: the worked problems as a list of questions, each with a box and the way to the answer."""

from html import escape

from phalanx.explore.problems import PROBLEMS, Problem
from phalanx.explore.records import Panel, Picture
from phalanx.explore.state import Reading

UNITS = {"params": "parameters", "s": "seconds", "share": "a share, such as 40 %", "": "a number"}


def worked(state: Reading) -> Panel:
    """All problems; nothing of the state matters to them.

    Args:
        state: what is read.
    """
    state.text("model")  # a panel depends on something, so that it can be kept
    html = "".join(_question(number, problem) for number, problem in enumerate(PROBLEMS, 1))
    rows = [(str(n), p.question, p.source) for n, p in enumerate(PROBLEMS, 1)]
    return Panel(
        (), (Picture("problems", "worked problems", html, ("", "question", "source"), rows),)
    )


def _question(number: int, problem: Problem) -> str:
    unit = UNITS.get(problem.unit, problem.unit)
    ask = "Your answer, yes or no" if problem.unit == "yes or no" else f"Your answer, in {unit}"
    id = escape(problem.id)
    return (
        f'<form class="problem" data-problem="{id}"><p><b>{number}.</b> {escape(problem.question)} '
        f'<span class="fine">{escape(problem.source)}</span></p>'
        f'<p class="ask"><label>{escape(ask)} <input name="answer" autocomplete="off" spellcheck="false"></label>'
        f'<button class="try">Grade it</button> <span class="grade" role="status"></span></p>'
        f"<details><summary>Show the way</summary><p>{escape(problem.way)}</p></details></form>"
    )
