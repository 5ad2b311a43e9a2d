"""The page in a real browser: drawn, zoomed, reached by the keyboard, read by axe; light, dark and narrow."""

from __future__ import annotations

import pytest

from deep500_timing.report import write_report

pytestmark = pytest.mark.slow

WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 390, "height": 800}
TIMEOUT_MS = 20_000


@pytest.fixture(scope="module")
def url(run, tmp_path_factory):
    """Where the page is."""
    path = tmp_path_factory.mktemp("browser") / "digits.html"
    write_report(run, path)
    return path.as_uri()


@pytest.fixture(scope="module", params=["light", "dark", "narrow"])
def opened(request, browser, url):
    """The page without a network, its charts drawn, and what went wrong."""
    scheme = "dark" if request.param == "dark" else "light"
    context = browser.new_context(
        offline=True, viewport=NARROW if request.param == "narrow" else WIDE, color_scheme=scheme
    )
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    page.faults = []
    page.on("console", lambda message: page.faults.append(message.text))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("dialog", lambda dialog: page.faults.append("a dialog"))
    page.on("request", lambda request: page.faults.append(request.url) if request.url != url else None)
    page.goto(url)
    page.wait_for_selector("html[data-drawn=yes]")
    yield page
    context.close()


def test_every_chart_is_drawn(opened):
    """Each has marks; nothing was asked of a host, nothing said on the console, and nothing is wider than the page."""
    charts = opened.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => [c.dataset.drawn, "
        "c.querySelectorAll('.role-mark path, .role-mark text').length > 0])"
    )
    assert [["yes", True]] * 16 == charts
    assert [] == opened.faults
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_axe_finds_nothing_serious(opened):
    """Nor anything of less weight."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(opened).response
    assert [] == [(fault["id"], fault["impact"], fault["nodes"][0]["html"]) for fault in found["violations"]]
    assert len(found["passes"]) > 20


def _ends(page, chart):
    return sorted(page.locator(f"#chart-{chart} .role-axis-label text").all_text_contents())


def _until(page, chart, wanted):
    """The axis as soon as it is the wanted one, or the last one after some seconds."""
    for _ in range(100):
        if wanted(_ends(page, chart)):
            break
        page.wait_for_timeout(50)
    return _ends(page, chart)


def test_the_timeline_zooms(opened):
    """By its buttons and by dragging; and goes back."""
    group = opened.locator("#steps .zoom").last
    chart = group.get_attribute("data-chart")
    whole = _ends(opened, chart)
    for _ in range(3):
        group.get_by_role("button", name="zoom in").click()
    near = _until(opened, chart, lambda ends: ends != whole)
    assert whole != near
    group.get_by_role("button", name="move to the right").click()
    right = _until(opened, chart, lambda ends: ends != near)
    assert near != right
    drawing = opened.locator(f"#chart-{chart} svg")
    drawing.evaluate("e => e.scrollIntoView({block: 'start', behavior: 'instant'})")  # The mouse needs it in view.
    box = drawing.bounding_box()
    opened.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30)
    opened.mouse.down()
    opened.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 30, steps=4)  # a step of the labels and more
    opened.mouse.up()
    assert right != _until(opened, chart, lambda ends: ends != right)
    group.get_by_role("button", name="whole").click()
    assert whole == _until(opened, chart, lambda ends: ends == whole)
    assert [] == opened.faults


def test_the_keyboard_reaches_everything(opened):
    """By the tabulator alone: links, buttons, toggles, and tables that scroll; Enter opens a chart's numbers."""
    opened.evaluate("document.activeElement.blur()")
    opened.evaluate("for (const d of document.querySelectorAll('details')) d.open = false")
    wanted = opened.evaluate(
        "[...document.querySelectorAll('a, button, summary, [tabindex]')].filter(e => !e.closest('details') || "
        "e.tagName == 'SUMMARY').map((e, n) => { e.dataset.n = n; return n; })"
    )
    reached = set()
    for _ in range(len(wanted) + 2):
        opened.keyboard.press("Tab")
        number = opened.evaluate("document.activeElement.dataset.n")
        if number is not None:
            reached.add(int(number))
    assert set(wanted) == reached
    opened.locator("#tree summary").first.focus()
    opened.keyboard.press("Enter")
    table = opened.locator("#tree details").first
    assert table.evaluate("d => d.open")
    assert "FORWARD" in table.inner_text()


def test_printed_it_is_white(opened):
    """On paper the page is light for any screen, and the charts are there."""
    opened.emulate_media(media="print")
    colours = opened.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    buttons = opened.evaluate("getComputedStyle(document.querySelector('.zoom')).display")
    opened.emulate_media(media="screen")
    assert ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "none"] == [*colours, buttons]


def test_a_command_is_copied(opened):
    """By its button, which says so, also from a page that is a file."""
    command = "<p id=copied><code>deep500-timing top</code> <button data-copy>Copy</button></p>"
    opened.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", command)
    opened.locator("#copied button").click()
    assert "deep500-timing top" == opened.evaluate("getSelection().toString()")
    assert "Copied" == opened.evaluate("(p => { p.remove(); return p.lastChild.textContent; })(copied)")


def test_no_code_comes_out_of_texts(opened):
    """The page's policy refuses code that is not its own, were any to come in."""
    said = opened.evaluate(
        "() => { window.came_in = 0; const s = document.createElement('script'); s.textContent = 'window.came_in = 1';"
        "document.body.append(s); const p = document.createElement('p'); document.body.append(p);"
        "p.innerHTML = '<button onclick=\"window.came_in = 2\"></button>'; p.firstChild.click();"
        "p.remove(); s.remove(); return window.came_in; }"
    )
    refused = len(opened.faults)
    opened.faults.clear()
    assert (0, 2) == (said, refused)
