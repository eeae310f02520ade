"""The pages of a made-up group in a real browser: drawn, linked, safe, for keyboards and phones, quiet when hidden."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.dashboard.browser import PICTURES, Visitor
from tests.dashboard.serving import Served
from tests.dashboard.simulated import Recorded, SimulatedGroup
from tests.eventually import eventually

pytestmark = pytest.mark.may_leak("a browser starts and ends processes of its own as it likes; it ends with the module")

Visit = Callable[..., Visitor]

PAGES = {
    "overview": "/",
    "calls": "/calls",
    "call": "/calls/worker0%2377",
    "waiting": "/waiting",
    "timeline": "/timeline",
    "references": "/references",
    "reference": "/references/3.1",
    "links": "/links",
    "link": "/links/worker2/worker6",
    "gradients": "/gradients",
    "pass": "/gradients/4711.1",
    "events": "/events",
    "stacks": "/stacks",
    "thread": "/stacks/worker1/1003",
    "functions": "/functions",
    "function": "/functions/model.forward",
    "worker": "/workers/worker3",
    "dead-worker": "/workers/worker6",
}

IS_DRAWN = """() => [...document.querySelectorAll('canvas')].some((canvas) => {
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(pixels).size > 9;
})"""
TEXTS_BEYOND_THEIR_BOX = """() => [...document.querySelectorAll('.box')].flatMap((box) => {
    const edge = box.querySelector('rect').getBoundingClientRect().right;
    const texts = [...box.querySelectorAll('.title, .note')];
    return texts.filter((each) => each.getBoundingClientRect().right > edge).map((each) => each.textContent);
})"""
HIDE = """(hidden) => {
    Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.fixture(scope="module")
def group() -> SimulatedGroup:
    group = SimulatedGroup(8)
    group.dead, group.silent = {"worker6"}, {"worker7"}
    return group


@pytest.fixture(scope="module")
def served(group: SimulatedGroup) -> Iterator[Served]:
    with Served(group) as served:
        yield served


def test_every_page_is_drawn(served: Served, visit: Visit) -> None:
    visitor = visit(served)
    if PICTURES:  # with curves that have come some way
        eventually(lambda: len(served.dashboard.sampler.history.group.times) > 25)
    for name, path in PAGES.items():
        visitor.turn_to(path)
        assert visitor.page.locator("h1, .tiles").count()
        assert "6 of 8 workers answered" in visitor.page.locator(".answered").inner_text()
        if name in ("overview", "timeline", "function", "link"):  # what is drawn on a canvas is not blank
            visitor.page.wait_for_function(IS_DRAWN)
        if PICTURES and name == "references":  # what they were is known since the page is open
            eventually(lambda: len(served.dashboard.sampler.history.owners["worker3"].times) > 25)
        visitor.picture(name)


def test_dark_pages(served: Served, visit: Visit) -> None:
    visitor = visit(served, theme="dark")
    for name in ("overview", "waiting", "timeline", "links"):
        visitor.turn_to(PAGES[name])
        assert visitor.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
        visitor.picture(f"{name}-dark")


def test_on_a_phone_no_page_is_wider_than_the_screen(served: Served, visit: Visit) -> None:
    visitor = visit(served, width=390, height=780)
    for name, path in PAGES.items():
        visitor.turn_to(path)
        try:
            visitor.page.wait_for_function("document.documentElement.scrollWidth <= 390")  # once curves have their size
        except Exception as error:
            error.add_note(f"{name} is {visitor.page.evaluate('document.documentElement.scrollWidth')} wide")
            raise
        if name in ("overview", "call"):
            visitor.picture(f"{name}-phone")


def test_a_click_leads_from_a_stuck_call_to_the_stack_that_holds_it_up(served: Served, visit: Visit) -> None:
    page = visit(served).page
    page.click("nav a:has-text('Calls')")
    page.click("td a:has-text('worker0#77')")
    page.wait_for_selector("#chain .stack .inner:visible")
    assert "acquire_all" in page.locator("#chain .stack").last.inner_text()
    page.click("#chain .note a >> nth=0")
    page.wait_for_selector("h1:has-text('Thread')")


def test_a_cycle_is_red_where_it_is(served: Served, visit: Visit) -> None:
    visitor = visit(served)
    visitor.go("/waiting")
    assert visitor.page.locator(".box.bad").count() == 3
    assert visitor.page.locator(".arrow.bad").count() == 3
    red = visitor.page.locator(".arrow.bad path").first.evaluate("(each) => getComputedStyle(each).stroke")
    assert red == "rgb(196, 32, 58)"
    assert "⚠" in visitor.page.title()


def test_what_waits_is_said_in_words_and_stays_in_its_box(served: Served, visit: Visit) -> None:
    visitor = visit(served)
    visitor.go("/waiting")
    lines = visitor.page.locator(".lines li").all_inner_texts()
    assert [line for line in lines if "have not come" in line] == ["barrier 3: worker6 and worker7 have not come"]
    assert any(line.startswith("backward pass 4711 on worker1 waits for 2 gradients") for line in lines)
    assert not [line for line in lines if " is →" in line]
    assert visitor.page.evaluate(TEXTS_BEYOND_THEIR_BOX) == []


def test_an_address_that_is_no_text_is_a_page_that_says_so(served: Served, visit: Visit) -> None:
    visitor = visit(served)
    for path in ("/calls/%ff%", "/workers/%E0%A4%A"):
        visitor.go(path)
        assert visitor.page.locator(".empty").count()


def test_names_are_text(visit: Visit) -> None:
    """Names come from workers. Shown as HTML this one would open a dialog, which the visitor takes for a complaint."""
    group = SimulatedGroup(3)
    group.names[1] = name = '<img src=x onerror="alert(1)"><script>alert(2)</script>&amp;'
    group.dead = {group.names[2]}
    group.names[2] = "</title><svg onload=alert(3)>"
    group.dead = {group.names[2]}
    with Served(group) as served:
        visitor = visit(served)
        for path in (
            "/",
            "/calls",
            "/waiting",
            "/timeline",
            "/links",
            "/stacks",
            "/events",
            "/references",
            "/gradients",
        ):
            visitor.turn_to(path)
            assert visitor.page.locator("img:not(.brand img), body script, svg[onload]").count() == 0
        visitor.turn_to("/")
        visitor.page.click("td a:has-text('onerror')")
        visitor.page.wait_for_selector("h1:has-text('onerror')")
        assert name in visitor.page.locator("h1").inner_text()
        assert visitor.page.locator("h1 img").count() == 0
        visitor._context.close()


def test_keys(served: Served, visit: Visit) -> None:
    page = visit(served).page
    page.keyboard.press("f")
    page.wait_for_selector("h1:has-text('Functions')")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 .mono")
    page.keyboard.press("Backspace")
    page.wait_for_selector("h1:has-text('Functions')")
    page.keyboard.press("/")
    page.keyboard.type("embed")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog kbd")
    page.keyboard.press("Escape")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("p")
    page.wait_for_selector(".pulse.paused")


def test_tables_are_sorted_by_the_server_and_copied_as_csv(visit: Visit) -> None:
    group = SimulatedGroup(4)
    group.names[0] = "=cmd()"
    with Served(group) as served:
        page = visit(served).page
        page.click("th button:has-text('Worker')")
        page.wait_for_selector("th[aria-sort=descending]")
        names = page.locator("td.is-worker a").all_inner_texts()
        assert names[:4] == ["worker3", "worker2", "worker1", "=cmd()"]
        page.click(".card:has(h2:text-is('Workers')) button:has-text('Copy CSV')")
        page.wait_for_selector("button:has-text('Copied')")
        lines = page.evaluate("navigator.clipboard.readText()").splitlines()
        assert lines[0].startswith("State,Worker")
        assert [line.split(",")[1] for line in lines[1:]] == ["worker3", "worker2", "worker1", "'=cmd()"]
        page.context.close()


def test_the_timeline_is_zoomed_and_moved(served: Served, visit: Visit) -> None:
    visitor = visit(served)
    visitor.go("/timeline")
    page = visitor.page
    page.locator(".timeline canvas").hover()
    page.mouse.wheel(0, -300)
    page.wait_for_function("() => Number(new URLSearchParams(location.search).get('seconds')) < 19")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("button:has-text('Go on with now')")
    page.keyboard.press("0")
    page.wait_for_function("() => !location.search")


def test_workers_are_left_alone_when_no_page_looks(visit: Visit) -> None:
    group = SimulatedGroup(2)
    with Served(group, interval=0.05) as served:
        visitor = visit(served)
        page = visitor.page
        page.evaluate(HIDE, True)
        _is_left_alone(group)
        asked = group.asked
        page.evaluate(HIDE, False)
        eventually(lambda: group.asked > asked + 2)
        visitor._context.close()
        _is_left_alone(group)


def _is_left_alone(group: SimulatedGroup) -> None:
    """It was not asked for as long as six turns take."""
    since = [group.asked, time.monotonic()]

    def quiet() -> bool:
        if group.asked != since[0]:
            since[:] = [group.asked, time.monotonic()]
        return time.monotonic() - since[1] > 0.3

    eventually(quiet)


def test_empty_partial_and_failed_groups_say_so(visit: Visit) -> None:
    group = SimulatedGroup(2, cycle=False)
    with Served(group, interval=0.05) as served:
        visitor = visit(served)
        page = visitor.page
        visitor.go("/gradients")
        page.wait_for_selector("table")
        group.silent = set(group.names)
        page.wait_for_selector(".banner.warn:has-text('A partial picture')")
        page.wait_for_selector(".empty:has-text('No backward pass')")
        group.error = "no worker of the group answers"
        page.wait_for_selector(".banner.bad:has-text('no worker of the group answers')")
        assert page.locator("main").get_attribute("data-state") == "problem"
        group.error, group.silent = None, set()
        page.wait_for_selector("table")
        visitor.expected = len(visitor.complaints)
        served.stop()
        page.wait_for_selector(".banner:has-text('The dashboard does not answer')")
        visitor.page.close()
        visitor.complaints.clear()  # of the browser, that it could not connect


def test_a_browser_without_the_token_is_told_what_to_do(browser: object, served: Served) -> None:
    page = browser.new_page()  # type: ignore[attr-defined]
    answer = page.goto(served.base + "/calls")
    assert answer.status == 403
    assert "prints a new address" in page.locator("main").inner_text()
    page.close()


def test_a_group_of_200_is_cells_and_bars_in_a_small_page(visit: Visit) -> None:
    with Served(Recorded(SimulatedGroup(200))) as served:
        visitor = visit(served)
        weights: list[int] = []
        visitor.page.on("response", lambda answer: weights.append(int(answer.headers.get("content-length", 0))))
        visitor.page.reload()
        visitor.live()
        assert visitor.page.locator(".cells a").count() == 200
        nodes = visitor.page.evaluate("document.querySelectorAll('*').length")
        assert nodes < 6000
        assert sum(weights) < 1_000_000
        if PICTURES:
            eventually(lambda: len(served.dashboard.sampler.history.group.times) > 40)
        visitor.picture("overview-200")
