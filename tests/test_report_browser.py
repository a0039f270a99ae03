"""The page in a real browser: no error, and the maps show what the JSON says of each step."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvalloc.tests.command import kvalloc
from kvalloc.tests.compare_example import compare_example

selenium = pytest.importorskip("selenium", reason="selenium is not installed (the dev extra)")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = (
    "</script><script>document.title = 'hacked'</script><img src=x onerror='document.title=1'>"
)
Owner = tuple[int, str]
"""A request, and whether the slot stores a token."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its chromedriver here (Debian: chromium, chromium-driver)")
    options = ChromeOptions()
    options.binary_location = binary
    # As root, and in containers with a small /dev/shm, it starts only so.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument("--window-size=1280,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(options=options, service=ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def hole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hole")
    specs = [word for spec in ("contiguous:max", "paged:4", "vmm:4") for word in ("-b", spec)]
    made = kvalloc("compare", "hole", "--account", "--slots", "80", *specs, folder=folder)
    assert made.code == 0
    assert kvalloc("report", "out", folder=folder).code == 0
    return folder / "out"


def backends(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "compare.json").read_text())["backends"]
    return found


def open_page(browser: Chrome, folder: Path, link: str = "") -> None:
    browser.get("about:blank")  # a new hash alone would not load again
    browser.get((folder / "report.html").as_uri() + link)
    check_no_error(browser)


def check_no_error(browser: Chrome) -> None:
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def shown(browser: Chrome, css: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, css).text


COLUMNS, ROWS = 16, 5  # of a map of 80 slots
READ = """const [columns, rows] = arguments;
return [...document.querySelectorAll(".card")].map((card) => {
  card.scrollIntoView({ block: "center", behavior: "instant" });
  const ground = card.querySelector(".ground").getBoundingClientRect();
  const slots = [];
  for (let slot = 0; slot < columns * rows; slot++) {
    const x = ground.left + ((slot % columns + 0.5) * ground.width) / columns;
    const y = ground.top + ((Math.floor(slot / columns) + 0.5) * ground.height) / rows;
    slots.push(document.elementFromPoint(x, y)?.ariaLabel ?? null);
  }
  return {
    title: card.querySelector("h4").innerText,
    numbers: [...card.querySelectorAll("dd")].map((dd) => [dd.dataset.number, dd.innerText]),
    refused: [...card.querySelectorAll("li")].map((line) => line.innerText),
    slots,
  };
});"""


def check_step(browser: Chrome, folder: Path, step: int) -> None:
    """Every map and every number is that of the step in the JSON."""
    assert shown(browser, ".step") == str(step)
    read = browser.execute_script(READ, COLUMNS, ROWS)
    for backend, card in zip(backends(folder), read, strict=True):
        owners = backend["owners"]
        assert card["title"].startswith(backend["spec"])
        place = owners["steps"].index(step)
        numbers = {name: values[place] for name, values in owners["numbers"].items()}
        numbers["waste"] = numbers["reserved"] - numbers["live"]
        told = {name: number.replace(",", "") for name, number in card["numbers"]}
        assert told == {name: str(value) for name, value in numbers.items()}
        assert drawn(card["slots"]) == recorded(owners["rows"][place]), (backend["spec"], step)
        refused = [line for line in owners["refusals"] if line[0] == step]
        for line, (_, request, *then) in zip(card["refused"], refused, strict=True):
            assert re.findall(r"\d+", line) == [str(number) for number in (request + 1, *then)]


def drawn(labels: list[str | None]) -> dict[int, Owner]:
    """The owner of each slot, as the shape tells that is drawn where the slot is."""
    slots = {}
    for slot, label in enumerate(labels):
        if label is not None:
            told = re.fullmatch(r"request (\d+), slots? (\d+)(?:–(\d+))?, (\w+)", label)
            assert told is not None, label
            assert int(told[2]) <= slot <= int(told[3] or told[2])
            slots[slot] = int(told[1]), told[4]
    return slots


def recorded(row: list[list[int]]) -> dict[int, Owner]:
    return {
        slot: (request + 1, "stored" if slot < low + stored else "empty")
        for low, high, request, stored in row
        for slot in range(low, high)
    }


def test_the_slider_shows_each_step_as_the_json_has_it(browser: Chrome, hole: Path) -> None:
    open_page(browser, hole)
    slider = browser.find_element(By.CSS_SELECTOR, ".slider")
    check_step(browser, hole, 0)
    for step in range(1, 6):
        slider.send_keys(Keys.ARROW_RIGHT)
        check_step(browser, hole, step)
    slider.send_keys(Keys.END)
    check_step(browser, hole, 19)
    check_no_error(browser)


def test_buttons_keys_and_links_lead_to_the_same_steps(browser: Chrome, hole: Path) -> None:
    open_page(browser, hole, "#step=12")
    check_step(browser, hole, 12)
    browser.find_element(By.CSS_SELECTOR, ".refusal").click()
    check_step(browser, hole, 2)
    assert browser.current_url.endswith("#step=2"), "a link to the refusal"
    assert "needs 20, 32 free, largest run 16" in shown(browser, ".refused")
    browser.find_element(By.CSS_SELECTOR, ".previous").click()
    check_step(browser, hole, 1)
    browser.find_element(By.CSS_SELECTOR, ".maps").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    check_step(browser, hole, 3)
    browser.execute_script("location.hash = '#step=7'")
    WebDriverWait(browser, 10).until(lambda _: shown(browser, ".step") == "7")
    check_step(browser, hole, 7)
    check_no_error(browser)


def test_play_goes_on_until_it_is_paused(browser: Chrome, hole: Path) -> None:
    open_page(browser, hole)
    button = browser.find_element(By.CSS_SELECTOR, ".play")
    button.click()
    assert button.text == "Pause"
    WebDriverWait(browser, 20).until(lambda _: int(shown(browser, ".step")) >= 2)
    button.click()
    assert button.text == "Play"
    check_step(browser, hole, int(shown(browser, ".step")))
    check_no_error(browser)


def test_pointing_at_a_slot_tells_its_owner(browser: Chrome, hole: Path) -> None:
    open_page(browser, hole, "#step=2")
    card = browser.find_element(By.CSS_SELECTOR, ".card")
    first, *_ = card.find_elements(By.CSS_SELECTOR, ".run.stored")
    ActionChains(browser).move_to_element(first).perform()
    low, high, request, stored = backends(hole)[0]["owners"]["rows"][2][0]
    assert shown(browser, "#tip") == (
        f"request {request + 1}: slots {low}–{high - 1}, {stored} with a token, "
        f"{high - low - stored} reserved without one"
    )
    ground = card.find_element(By.CSS_SELECTOR, ".ground")
    bottom = ground.rect["height"] // 2 - 3
    ActionChains(browser).move_to_element_with_offset(ground, 0, bottom).perform()
    assert shown(browser, "#tip") == "free: slots 64–79"
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not browser.find_element(By.CSS_SELECTOR, "#tip").is_displayed()
    check_no_error(browser)


def test_a_click_on_a_header_sorts(browser: Chrome, hole: Path) -> None:
    open_page(browser, hole)
    specs = ["contiguous:max", "paged:4", "vmm:4"]
    table = browser.find_elements(By.TAG_NAME, "table")[1]
    header = next(b for b in table.find_elements(By.TAG_NAME, "button") if "waste" in b.text)
    first = "tbody td:first-child"
    for order in (specs, ["paged:4", "vmm:4", "contiguous:max"]):
        header.click()
        assert [cell.text for cell in table.find_elements(By.CSS_SELECTOR, first)] == order
    check_no_error(browser)


def test_narrow_and_dark_windows_keep_everything_in_view(browser: Chrome, hole: Path) -> None:
    open_page(browser, hole, "#step=2")
    color = "return getComputedStyle(document.body).backgroundColor"
    width = "return document.documentElement.scrollWidth"
    light = browser.execute_script(color)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    phone = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        assert browser.execute_script(color) != light
        assert browser.execute_script(width) <= 360
        check_step(browser, hole, 2)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    check_no_error(browser)


def test_a_hostile_name_is_shown_and_does_nothing(browser: Chrome, tmp_path: Path) -> None:
    compare = compare_example(("contiguous:max", "paged:4"))
    compare["trace"]["name"] = compare["backends"][0]["spec"] = HOSTILE
    compare["backends"][1]["owners"] = None
    (tmp_path / "compare.json").write_text(json.dumps(compare))
    assert kvalloc("report", ".", folder=tmp_path).code == 0
    open_page(browser, tmp_path, "#step=3")
    assert HOSTILE in browser.title and HOSTILE in shown(browser, "h1")
    first, second = browser.find_elements(By.CSS_SELECTOR, ".card h4")
    assert first.text == HOSTILE and "too large" in second.text
    assert shown(browser, ".step") == "3"
    check_no_error(browser)
