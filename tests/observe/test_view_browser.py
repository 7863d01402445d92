"""The page of `fusionrl view` in a real browser: views, clicks, keys, hostile texts, size, light and dark."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fusionrl import cli
from fusionrl.observe.rollouts import RolloutWriter, list_rollouts
from tests.observe.browser import Browser
from tests.observe.view_runs import sample, trained, write_run, write_tokenizer

EVIL = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><!-- \u2028"
    "<svg onload=window.hacked=3> ${1} '\"` &lt; javascript:alert(1)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps of 4 samples; at step 20 the mismatch jumps, and sample 2 is why."""
    folder = tmp_path_factory.mktemp("view")
    mismatch = [0.01 + 0.0001 * (i % 3) for i in range(30)]
    mismatch[19] = 0.9
    steps = [[sample(4 * step + i, reward=float(i > 1), length=6) for i in range(4)] for step in range(30)]
    steps[19][3] |= {"status": "truncated", "response": "an answer without an end"}
    steps[4] = [row | {"prompt": "asked again", "group_index": 8} for row in steps[4]]
    steps[9] = [row | {"prompt": "asked again", "group_index": 18} for row in steps[9]]
    made = write_run(folder / "run", steps, write_tokenizer(folder / "model"), train__logprob_diff_mean=mismatch)
    path = list_rollouts(made)[19].path
    (made / "rollouts" / "trained" / path.name).unlink()
    rows = [trained(line, 6, mismatch=5.0 if line == 2 else 0.01) for line in range(4)]
    RolloutWriter(made).write_trained(path, rows)
    assert cli.main(["view", str(made)]) == 0
    return made


def rows_of(browser: Browser, caption: str) -> list[list[str]]:
    """The cells of a table's body."""
    table = f"[...document.querySelectorAll('table')].find((t) => t.caption.textContent === {caption!r})"
    return browser.js(f"[...{table}.tBodies[0].rows].map((r) => [...r.cells].map((c) => c.textContent))")


def text_at(browser: Browser, selector: str) -> str:
    """The text of the first element of a kind."""
    return browser.js(f"document.querySelector({selector!r}).textContent")


def count(browser: Browser, selector: str) -> int:
    return browser.js(f"document.querySelectorAll({selector!r}).length")


NAMED = {"button", "link", "textbox", "searchbox", "spinbutton", "checkbox", "radio", "combobox", "listbox", "table"}
NAMED |= {"image", "img", "region"}
SAMPLES, GROUPS, STEPS = "Samples of this step", "Groups of this step", "Steps, with their samples behind the number"


def test_from_a_jump_to_its_sample_in_two_clicks(browser: Browser, run: Path) -> None:
    browser.open(run / "view.html")
    assert count(browser, ".links a") == 1
    browser.click(".links a")
    browser.settle()
    assert text_at(browser, "h1") == "Step 20"
    assert rows_of(browser, SAMPLES)[0][0] == "78", "the worst first, as the curve was of mismatch"
    browser.click("table a")
    browser.settle()
    assert text_at(browser, "h1") == "Sample 78 · Step 20"
    assert count(browser, ".tokens [role=option]") == 6
    assert count(browser, ".tokens span[style*=background]"), "coloured by mismatch, as there is one"
    assert browser.errors == [] and browser.requests == [(run / "view.html").resolve().as_uri()]


def test_a_click_on_a_curve_and_its_keys_lead_to_a_step(browser: Browser, run: Path) -> None:
    browser.open(run / "view.html")
    browser.js("document.querySelector('.plot svg').focus()")
    for _ in range(3):
        browser.key("ArrowRight")
    assert text_at(browser, ".reading") == "step 3: 0.5"
    browser.key("Enter")
    browser.wait("document.querySelector('h1').textContent === 'Step 3'")
    assert browser.js("document.activeElement.tagName") == "H1", "a screen reader goes on at the title"
    browser.open(run / "view.html")
    browser.click(".plot svg")
    browser.wait("/^Step 1[4-6]$/.test(document.querySelector('h1').textContent)")


def test_filters_groups_and_a_prompt_over_the_steps(browser: Browser, run: Path) -> None:
    browser.open(run / "view.html", "#/run/0/file/19")
    assert len(rows_of(browser, SAMPLES)) == 4 and len(rows_of(browser, GROUPS)) == 2
    browser.click("[data-filter=equal]")
    assert len(rows_of(browser, SAMPLES)) == 4, "both groups have equal rewards"
    browser.click("[data-filter=truncated]")
    assert [row[0] for row in rows_of(browser, SAMPLES)] == ["79"]
    browser.click("[data-filter=truncated]")
    field = "document.getElementById('text-filter')"
    browser.js(f"{field}.value = 'WITHOUT AN end'; {field}.dispatchEvent(new Event('input'))")
    assert [row[0] for row in rows_of(browser, SAMPLES)] == ["79"]
    browser.go("#/run/0/file/4/group/0")
    assert count(browser, "article") == 4, "side by side"
    assert "asked again" in browser.text()
    browser.click("main section a")
    browser.settle()
    assert [row[0] for row in rows_of(browser, "Groups of this prompt")] == ["Step 5", "Step 10"]


def test_tokens_by_keyboard(browser: Browser, run: Path) -> None:
    browser.open(run / "view.html", "#/run/0/file/19/sample/2")
    assert browser.js("document.querySelector('[name=by]:checked').value") == "mismatch"
    browser.js("document.querySelector('.tokens').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    said = text_at(browser, ".details")
    trained = ("trainer -", "trainer − engine ", "entropy 0.", "advantage 0.25")
    parts = ("token 1 ", "id ", "engine -", *trained, "weights 1")
    assert [part for part in parts if part not in said] == []
    assert browser.js("document.querySelector('.tokens').getAttribute('aria-activedescendant')") == "t1"
    browser.click("[name=by][value=entropy]")
    assert "entropy, nats" in text_at(browser, ".legend")
    assert text_at(browser, ".tokens").count("[") == 0, "decoded from the ids"


def test_hostile_texts_stay_texts(browser: Browser, tmp_path: Path) -> None:
    texts = {"prompt": EVIL, "response": EVIL, "label": EVIL, "metadata": {EVIL: EVIL}, "group_index": EVIL}
    messages = [{"role": EVIL, "content": EVIL}]
    rows = [sample(i, reward={"r": 1.0, EVIL: 0.0}, status=EVIL, messages=messages, **texts) for i in range(2)]
    made = write_run(tmp_path / "<img src=x onerror=hacked=1>", [rows, rows], **{f"train/{EVIL}": [1.0, 2.0]})
    tokenizer = {"model": {"vocab": {EVIL: 0}}, "added_tokens": [{"id": i, "content": EVIL} for i in range(16)]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    page = tmp_path / "page.html"
    assert cli.main(["view", str(made), "--html", str(page), "--tokenizer", str(tmp_path)]) == 0
    browser.open(page)
    browser.settle()
    for route in ("file/0", "file/0/group/0", "file/0/sample/0", "prompt/0"):
        browser.go(f"#/run/0/{route}")
        assert "onload=window.hacked=3" in browser.text(), route
    assert browser.js("window.hacked") is None
    assert count(browser, "main img, main svg[onload]") == 0
    assert browser.errors == [] and len(browser.requests) == 1
    assert browser.js("fetch('https://example.invalid/').then(() => 'went out', () => 'refused')") == "refused"
    assert any("Content Security Policy" in error for error in browser.errors)


def test_ten_thousand_steps_and_a_torn_last_line(browser: Browser, tmp_path: Path) -> None:
    made = write_run(tmp_path / "run", [[sample(i) for i in range(4)]])
    values = np.random.default_rng(0).normal(size=(10_000, 12)).round(5).tolist()
    names = ["step", "attempt", "train/loss", "train/entropy", "train/grad_norm", *(f"train/x{i}" for i in range(9))]
    lines = [json.dumps(dict(zip(names, [step, 1, *row], strict=True))) for step, row in enumerate(values, start=1)]
    (made / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 10001, "atte']))
    path = list_rollouts(made)[0].path
    path.write_bytes(path.read_bytes()[:-40])
    assert cli.main(["view", str(made)]) == 0
    assert browser.open(made / "view.html") < 10, "half a second on a quiet machine"
    assert len(rows_of(browser, STEPS)) == 100 and "1 to 100 of 10,000" in browser.text()
    browser.js("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Next rows').click()")
    assert rows_of(browser, STEPS)[0][0] == "101"
    browser.js("[...document.querySelectorAll('thead button')].find((b) => b.textContent === 'gradient').click()")
    assert float(rows_of(browser, STEPS)[0][-2]) == pytest.approx(max(row[2] for row in values), rel=1e-3)
    assert count(browser, "[aria-sort=descending]") == 1
    browser.go("#/run/0/file/0")
    assert "lines that cannot be read" in browser.text() and len(rows_of(browser, SAMPLES)) == 3
    assert browser.errors == []


def test_two_runs_side_by_side(browser: Browser, run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [[sample(i) for i in range(2)]] * 2, train__logprob_diff_mean=[0.5, 0.25])
    assert cli.main(["view", str(run), str(other), "--html", str(tmp_path / "both.html")]) == 0
    browser.open(tmp_path / "both.html")
    assert browser.js("document.querySelectorAll('.chart')[0].querySelectorAll('.line').length") == 2
    assert text_at(browser, "h1") == "run and other"
    assert [row[:2] for row in rows_of(browser, STEPS)[:3]] == [["1", "run"], ["1", "other"], ["2", "run"]]
    browser.go("#/run/1/file/1")
    assert "other" in text_at(browser, "nav") and len(rows_of(browser, SAMPLES)) == 2
    assert browser.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_has_a_name_and_can_be_read(scheme: str, browser: Browser, run: Path) -> None:
    """What a screen reader is told of, and the contrast of texts, in light and dark."""
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(run / "view.html")
    assert browser.js("document.documentElement.lang") == "en"
    for route in ("#", "#/run/0/file/19", "#/run/0/file/19/group/0", "#/run/0/file/19/sample/3"):
        browser.go(route) if route != "#" else browser.settle()
        nodes = [node for node in browser.ask("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        nameless = {node["role"]["value"] for node in nodes if not node.get("name", {}).get("value")}
        assert not nameless & NAMED, route
        assert count(browser, "h1") == 1 and browser.js(_LEAST_CONTRAST) >= 4.5, route
    for by in ("mismatch", "entropy"):
        browser.click(f"[name=by][value={by}]")
        assert browser.js(_LEAST_CONTRAST) >= 4.5, by
    browser.ask("Emulation.setEmulatedMedia", features=[])


# The least contrast (WCAG 2) of a text and what is behind it; translucent colours are laid over each other.
_LEAST_CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const over = (colors) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let least = 21;
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(':disabled, .lacking, noscript')) continue;
    const behind = [];
    let seen = 1;
    for (let e = element; e; e = e.parentElement) {
      behind.unshift(getComputedStyle(e).backgroundColor);
      seen *= getComputedStyle(e).opacity;
    }
    const back = over(behind), front = over([...behind, getComputedStyle(element).color]);
    const mixed = front.map((c, i) => c * seen + back[i] * (1 - seen));
    const [a, b] = [light(mixed), light(back)].sort((x, y) => y - x);
    least = Math.min(least, (a + 0.05) / (b + 0.05));
  }
  return least;
})()"""
