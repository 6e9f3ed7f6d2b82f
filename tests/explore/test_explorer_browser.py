"""The page in a real browser: Debian's Chromium, driven by Playwright."""

import json
import re
from collections.abc import Iterator

import pytest
from explorer_client import get
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from phalanx.explore.page import PARTS

V5P = "v1&model=llama-3.1-70b&chip=tpu-v5p&dp=1024&tp=1&pp=1&B=3M"


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that may say nothing on its console, and ask nobody but this machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    found = context.new_page()
    said: list[str] = []
    foreign: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        said.append(message.text)

    def asked(request: Request) -> None:
        if not re.match(rf"(http|ws)://{address}/", request.url):
            foreign.append(request.url)

    found.on("console", heard)
    found.on("pageerror", lambda error: said.append(str(error)))
    found.on("request", asked)
    yield found
    assert said == []
    assert foreign == []
    context.close()


def visit(page: Page, address: str, query: str = "", part: str = "") -> None:
    """Open the page and wait until it is alive."""
    page.goto(f"http://{address}/?{query}" + (f"#{part}" if part else ""))
    page.wait_for_selector("body[data-ready]")
    page.wait_for_timeout(200)


def scrub(page: Page, key: str, part: str):
    """The scrubber of an input in a part."""
    return page.locator(f"#{part} .scrub[data-k={key}]").first


def test_dragging_a_number_moves_what_follows_and_undo_brings_it_back(page: Page, address: str):
    visit(page, address, "", "tensor")
    tp, ratio = scrub(page, "tp", "tensor"), page.locator('#tensor [data-r="tp.ratio"]')
    before = ratio.inner_text()
    tp.scroll_into_view_if_needed()
    box = tp.bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + 30, box["y"] + 8, steps=4)
    expect(tp).to_have_text("16")
    page.mouse.up()
    expect(ratio).not_to_have_text(before)
    expect(page).to_have_url(re.compile(r"\?v1&tp=16"))
    page.keyboard.press("Control+z")
    expect(tp).to_have_text("8")
    expect(ratio).to_have_text(before)
    page.keyboard.press("Control+Shift+z")
    expect(tp).to_have_text("16")


def test_escape_in_the_middle_of_a_drag_restores(page: Page, address: str):
    visit(page, address, "", "tensor")
    tp = scrub(page, "tp", "tensor")
    tp.scroll_into_view_if_needed()
    box = tp.bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 8, steps=4)
    expect(tp).not_to_have_text("8")
    page.keyboard.press("Escape")
    expect(tp).to_have_text("8")
    page.mouse.up()


def test_everything_can_be_done_with_the_keyboard(page: Page, address: str):
    visit(page, address, "", "data")
    dp = page.locator(".top .scrub[data-k=dp]")
    dp.focus()
    for key, text in (
        ("ArrowUp", "32"),
        ("PageUp", "256"),
        ("ArrowDown", "128"),
        ("Home", "1"),
        ("End", "65,536"),
    ):
        page.keyboard.press(key)
        expect(dp).to_have_text(text)
    page.keyboard.press("Enter")
    page.keyboard.type("2^10")
    page.keyboard.press("Enter")
    expect(dp).to_have_text("1,024")
    expect(dp).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("7")
    page.keyboard.press("Escape")
    expect(dp).to_have_text("1,024")
    assert dp.get_attribute("aria-valuenow") == "1024"
    page.keyboard.press("Enter")
    page.keyboard.type("many")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("dp is 'many'")


def test_a_number_says_where_it_comes_from(page: Page, address: str):
    visit(page, address, V5P, "data")
    page.locator('#data [data-r="dp.floor1"]').click()
    card = page.locator("#card")
    expect(card).to_contain_text("C / W_ici")
    expect(card).to_contain_text("How to Parallelize")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_a_verdict_that_flips_is_announced(page: Page, address: str):
    visit(page, address, V5P, "data")
    dp = page.locator(".top .scrub[data-k=dp]")
    expect(page.locator('#data [data-r="dp.verdict"]')).to_contain_text("compute-bound")
    dp.focus()
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    expect(page.locator('#data [data-r="dp.verdict"]')).to_contain_text("communication-bound")
    expect(page.locator("#said")).to_contain_text("communication-bound")


def test_the_dot_of_the_roofline_can_be_dragged(page: Page, address: str):
    visit(page, address, V5P, "clocks")
    dot, batch = page.locator('[data-drag="roof"]'), scrub(page, "B", "notation")
    before = batch.inner_text()
    dot.scroll_into_view_if_needed()
    box = dot.bounding_box()
    page.mouse.move(box["x"] + 16, box["y"] + 16)
    page.mouse.down()
    page.mouse.move(box["x"] - 150, box["y"] + 16, steps=5)
    page.mouse.up()
    expect(page.locator(".top .scrub[data-k=B]")).not_to_have_text(before)


def test_every_text_on_the_page_is_that_of_the_json_after_walking_through(page: Page, address: str):
    visit(page, address)
    page.locator(".set", has_text="tpu-v5p").first.click()
    expect(page).to_have_url(re.compile("chip=tpu-v5p"))
    for part in PARTS:
        page.locator(f"#{part.name}").scroll_into_view_if_needed()
        page.wait_for_timeout(120)
    page.wait_for_timeout(400)
    query = page.url.partition("?")[2].partition("#")[0]
    records = json.loads(get(address, f"/api/v1/state?{query}").text)["records"]
    texts = page.evaluate(
        "[...document.querySelectorAll('[data-r]')].map(e => [e.dataset.r, 'v' in e.dataset"
        " ? e.children[1].textContent : e.textContent])"
    )
    assert len(texts) > 120
    assert [(name, text) for name, text in texts if records[name]["text"] != text] == []


def test_every_try_does_something(page: Page, address: str):
    visit(page, address)
    tries = page.locator("[data-try]")
    assert tries.count() >= 10
    for number in range(tries.count()):
        page.locator('[data-do="reset"]').click()
        expect(page).to_have_url(re.compile(r"/(#.*)?$"))
        before = page.url
        tries.nth(number).click()
        expect(page).not_to_have_url(before, timeout=8000)


def test_pinned_numbers_stand_beside_later_ones(page: Page, address: str):
    visit(page, address, V5P, "data")
    page.locator('[data-do="pin"]').click()
    page.locator(".top .scrub[data-k=dp]").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator('#data [data-r="dp.per_chip"]')).to_have_attribute("data-was", "2,930")
    page.locator('[data-do="pin"]').click()
    expect(page.locator("[data-was]")).to_have_count(0)


def test_a_plan_is_searched_and_its_best_layout_loaded(page: Page, address: str):
    visit(page, address, "v1&model=llama-3.1-8b&B=1M&dp=8&tp=8&pp=1&whynot=tp=8", "plan")
    page.locator('[data-do="search"]').click()
    expect(page.locator("#found table")).to_be_visible(timeout=60_000)
    expect(page.locator("#found .answer")).to_contain_text("Why not tp=8")
    best = page.locator("#found tbody tr").first
    line = best.locator("code").inner_text()
    best.locator("button").click()
    expect(page.locator('#plan [data-r="est.layout"]')).to_contain_text(line)


def test_a_search_can_be_stopped(page: Page, address: str):
    visit(page, address, "", "plan")
    page.locator('[data-do="search"]').click()
    expect(page.locator("#searching")).to_contain_text("searching,")
    page.locator('[data-do="stop"]').click()
    expect(page.locator("#searching")).to_have_text("stopped")


def test_a_problem_is_graded(page: Page, address: str):
    visit(page, address, "", "problems")
    form = page.locator('[data-problem="q2p"]')
    form.locator("input").fill("52 GB")
    form.locator("button").click()
    expect(form.locator(".grade")).to_contain_text("not four")
    form.locator("input").fill("26 GB")
    form.locator("button").click()
    expect(form.locator(".grade")).to_contain_text("right")


def test_a_large_timeline_is_drawn_on_a_canvas(page: Page, address: str):
    visit(page, address, "v1&p=16&m=256", "pipeline")
    page.locator("#pipeline canvas").first.scroll_into_view_if_needed()
    page.wait_for_timeout(800)
    painted = page.evaluate(
        "(() => { const c = document.querySelector('#pipeline canvas');"
        "return c.getContext('2d').getImageData(0, 0, c.width, 40).data.some((v) => v > 0) })()"
    )
    assert painted


def test_a_hostile_run_is_only_text(page: Page, address: str):
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    visit(page, address, "", "runs")
    page.locator("#runs").scroll_into_view_if_needed()
    expect(page.locator("#runlist label")).to_have_count(2, timeout=10_000)
    for box in page.locator("#runlist input").all():
        box.check()
        page.wait_for_timeout(150)
    expect(page.locator("#runs")).to_contain_text("<script>")
    assert page.locator("main script").count() == 0
    assert dialogs == []


def test_the_tour_leads_through_the_page_and_ends(page: Page, address: str):
    visit(page, address)
    page.locator('[data-do="tour"]').click()
    note = page.locator(".tour")
    for stop in range(1, 9):
        expect(note).to_contain_text(f"Next ({stop} of 9)")
        page.keyboard.press("Enter")
    expect(note).to_contain_text("Done")
    page.keyboard.press("Escape")
    expect(note).to_have_count(0)


def test_the_page_reads_without_a_script(browser: Browser, address: str):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"http://{address}/?{V5P}")
    expect(page.locator('#data [data-r="dp.floor1"]')).to_have_text("2,550")
    expect(page.locator("#data svg.bar").first).to_be_visible()
    page.locator("a.set", has_text="h100-sxm").first.click()
    expect(page.locator('#data [data-r="dp.floor1"]')).to_have_text("2,199")
    context.close()


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_sticks_out_at_any_width(page: Page, address: str, width: int):
    page.set_viewport_size({"width": width, "height": 844})
    visit(page, address, "v1&model=deepseek-v3&ep=8")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_no_violation(browser: Browser, address: str, theme: str, width: int):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if theme == "dark" else "light",
        bypass_csp=True,  # axe is put into the page
        reduced_motion="reduce",
    )
    page = context.new_page()
    visit(page, address)
    found = axe.run(page).response["violations"]
    told = [(v["id"], v["nodes"][0]["html"][:120], len(v["nodes"])) for v in found]
    assert told == []
    context.close()
