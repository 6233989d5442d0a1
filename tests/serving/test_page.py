"""The chat page: what can be read off the file, and what a real browser does with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Browser, find_chromium

import minifer
from minifer.perf.load.spawn import spawned_server

PACKAGE = Path(minifer.__file__).parent
PAGE = (PACKAGE / "serving" / "static" / "chat.html").read_text(encoding="utf-8")
SCRIPT = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)[0]
KEY = "a-key"


# -- the file alone


def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|@import|url\(|\bsrc=|//cdn", PAGE)
    assert re.findall(r"<link[^>]*>", PAGE) == ['<link rel="icon" href="data:,">']


def test_a_strict_content_security_policy_lets_the_page_work() -> None:
    """The server allows scripts by their hash, so there may be one, and no inline handlers."""
    assert len(re.findall(r"<script\b", PAGE)) == 1
    assert not re.search(r"<[^>]+\son\w+=", PAGE)
    assert not re.search(r"<[^>]+\sstyle=", PAGE)
    assert not re.search(r"\beval\(|new Function|setTimeout\(['\"]", SCRIPT)


def test_text_cannot_become_html() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc", SCRIPT)


def test_ids_that_the_script_uses_exist() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', PAGE)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT))
    assert used and used <= set(ids)
    assert {"scheduling", "kv", "prefill", "decode", "postprocessing"} <= set(ids)


def test_events_that_the_page_knows_are_those_the_engine_writes() -> None:
    known = set(re.findall(r'^  "(\w+\.\w+)"\(life', SCRIPT, re.MULTILINE))
    source = "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    assert len(known) >= 12
    assert {name for name in known if f'"{name}"' not in source} == set()


def test_every_field_has_a_label() -> None:
    for field in re.findall(r"<(?:input|textarea)[^>]*>", PAGE):
        before = PAGE[: PAGE.index(field)]
        assert "aria-label" in field or before.rfind("<label") > before.rfind("</label"), field


# -- in a browser


@pytest.fixture(scope="module")
def chromium() -> str:
    path = find_chromium()
    if path is None:
        pytest.skip("no chromium on the PATH: install it to run the page in a real browser")
    return path


@pytest.fixture(scope="module")
def server(chromium: str) -> Iterator[str]:
    with spawned_server(["--model", "minifer-tiny", "--api-key", KEY]) as url:
        yield url


@pytest.fixture(scope="module")
def tab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(chromium, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(tab: Browser, server: str) -> Iterator[Browser]:
    """The page, with the key, freshly loaded. Errors in the console fail the test."""
    tab.open(server)
    tab.evaluate(f"sessionStorage.setItem('minifer-key', {json.dumps(KEY)})")
    tab.open(server)
    tab.wait_for("model.textContent")
    tab.errors.clear()
    tab.requests.clear()
    yield tab
    assert tab.errors == []


def ask(browser: Browser, text: str, max_tokens: int = 24) -> None:
    """As a user does: type, press Enter."""
    browser.evaluate(f"document.getElementById('max-tokens').value = {max_tokens}")
    browser.evaluate("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter", 13, "\r")


def messages(browser: Browser) -> list[list[str]]:
    return browser.evaluate(
        "[...document.querySelectorAll('.message')].map(e => [e.classList[1], e.innerText])"
    )


IDLE = "document.getElementById('send').disabled === false"
ENDED = f"{IDLE} && life && life.end !== null"


def test_a_question_is_answered_and_every_stage_is_shown(browser: Browser, server: str) -> None:
    ask(browser, "What is a string?")
    browser.wait_for(ENDED)
    body = {
        "messages": [{"role": "user", "content": "What is a string?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = httpx.post(
        f"{server}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
    ).json()
    (question, reply) = messages(browser)
    assert question == ["user", "What is a string?"]
    text = browser.evaluate("document.querySelector('.assistant span').textContent")
    assert reply[0] == "assistant" and text == answer["choices"][0]["message"]["content"] != ""
    browser.wait_for("!life.drawing")
    usage = answer["usage"]
    count = usage["completion_tokens"]
    assert browser.evaluate("document.querySelectorAll('#tokens li').length") == count
    times = browser.evaluate("life.tokens.map(token => token.time)")
    assert times == sorted(times) and times[0] > 0
    shown = {
        stage: browser.evaluate(f"document.getElementById('{stage}').innerText")
        for stage in ("scheduling", "kv", "prefill", "decode", "postprocessing")
    }
    assert f"{count} steps · 0 preemptions" in shown["scheduling"]
    assert f"0 of {usage['prompt_tokens']} prompt tokens cached" in shown["kv"]
    assert f"{usage['prompt_tokens']} tokens computed" in shown["prefill"]
    assert f"{count} tokens sampled" in shown["decode"]
    assert f"finished: {answer['choices'][0]['finish_reason']}" in shown["postprocessing"]
    assert all(url.startswith(server) for url in browser.requests)


def test_escape_stops_the_answer_and_the_engine(browser: Browser) -> None:
    ask(browser, "Tell me everything.", max_tokens=900)
    browser.wait_for("life && life.tokens.length > 2")
    browser.press("Escape", 27)
    browser.wait_for(f"{ENDED} && !life.drawing")
    assert "finished: abort" in browser.evaluate("postprocessing.innerText")
    assert messages(browser)[1][1].endswith("Stopped.")
    assert browser.evaluate("messages.length") == 2  # what was said so far is part of the talk
    assert browser.evaluate("life.tokens.length") < 900


def test_a_new_chat_ends_the_answer_and_nothing_of_it_comes_back(browser: Browser) -> None:
    ask(browser, "Tell me everything.", max_tokens=900)
    browser.wait_for("life && life.tokens.length > 2")
    browser.evaluate("document.getElementById('new').click()")
    browser.wait_for(ENDED)
    assert "finished: abort" in browser.wait_for(
        "postprocessing.innerText.includes('finished') && postprocessing.innerText"
    )
    assert messages(browser) == [] and browser.evaluate("messages") == []


def test_without_a_key_the_page_asks_for_one(tab: Browser, server: str) -> None:
    tab.open(server)
    tab.evaluate("sessionStorage.clear()")
    tab.open(server)
    tab.wait_for("!document.getElementById('key-form').hidden")
    assert "asks for an API key" in tab.evaluate("error.innerText")
    tab.type("wrong")
    tab.press("Enter", 13, "\r")
    tab.wait_for("error.innerText.includes('does not accept')")
    tab.evaluate("document.getElementById('key').select()")
    tab.type(KEY)
    tab.press("Enter", 13, "\r")
    assert tab.wait_for("model.textContent") == "minifer-tiny"
    assert tab.evaluate("document.getElementById('key-form').hidden && error.hidden")
    assert tab.evaluate("localStorage.length") == 0
    tab.errors.clear()  # the console says that 401s were received


def test_the_keyboard_is_enough(browser: Browser) -> None:
    browser.wait_for("document.activeElement.id === 'prompt'")
    places = []
    for _ in range(4):
        places.append(browser.evaluate("document.activeElement.id"))
        browser.press("Tab", 9)
    assert places == ["prompt", "temperature", "max-tokens", "send"]


@pytest.mark.parametrize("width", [320, 390, 700, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, width: int) -> None:
    fake(browser, [delta("unbreakable" * 40), delta("", "stop")])
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **screen)
    ask(browser, "W" * 200)
    browser.wait_for(f"messages.length && {IDLE}")
    wide = browser.evaluate("document.documentElement.scrollWidth - document.body.clientWidth")
    assert wide <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_schemes(browser: Browser, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5 between a text and what is behind it."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", features=[feature])
    colours = browser.evaluate(
        "Object.fromEntries(['bg', 'fg', 'soft', 'card', 'user', 'blue', 'bad'].map(name => "
        "[name, getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()]))"
    )
    for front, back in [
        *(("fg", back) for back in ("bg", "card", "user")),
        *(("soft", "bg"), ("soft", "card"), ("bad", "bg"), ("bg", "blue")),
    ]:
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back, colours)
    headings = browser.evaluate(
        "[...document.querySelectorAll('.stage h3')].map(e => getComputedStyle(e).color)"
    )
    for heading in headings:  # as "color(srgb 0.2 0.3 0.4)"
        parts = [float(part) for part in re.findall(r"[\d.]+", heading)]
        colour = "#" + "".join(f"{round(part * 255):02x}" for part in parts)
        assert contrast(colour, colours["card"]) >= 4.5, (heading, colours["card"])


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """WCAG's relative luminance of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# -- answers of a server that a test makes up: `fetch` is replaced, the rest is the page


def delta(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def fake(
    browser: Browser,
    chunks: list[dict[str, Any]] | None = None,
    *,
    status: int = 200,
    message: str = "",
    headers: dict[str, str] | None = None,
    unreachable: bool = False,
) -> None:
    """From now on the server answers so. `sent` holds the bodies it was sent."""
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks or [])
    body = events if status == 200 else json.dumps({"error": {"message": message}})
    answer = {"status": status, "headers": headers or {}}
    browser.evaluate(
        "window.sent = []; window.fetch = async (url, options) => {"
        f"if ({json.dumps(unreachable)}) throw new TypeError('Failed to fetch');"
        "if (url.startsWith('/events')) return new Response('', {status: 404});"
        "window.sent.push(JSON.parse(options.body));"
        f"return new Response({json.dumps(body)}, {json.dumps(answer)}); }}"
    )


def test_what_a_model_writes_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror='hacked=1'><script>hacked=1</script>&amp;"
    fake(browser, [delta(evil[:20]), delta(evil[20:]), delta("", "stop")])
    ask(browser, "<b>bold</b>")
    browser.wait_for(f"messages.length === 2 && {IDLE}")
    assert messages(browser) == [["user", "<b>bold</b>"], ["assistant", evil]]
    assert browser.evaluate("document.querySelector('#log img, #log script, #log b')") is None
    assert browser.evaluate("typeof hacked") == "undefined"


def test_a_conversation_is_sent_whole_and_a_new_chat_forgets_it(browser: Browser) -> None:
    fake(browser, [delta("yes"), delta("", "stop")])
    for number, text in enumerate(("one", "two"), 1):
        ask(browser, text, max_tokens=7)
        browser.wait_for(f"messages.length === {2 * number} && {IDLE}")
    browser.evaluate("document.getElementById('new').click()")
    assert messages(browser) == []
    ask(browser, "three")
    browser.wait_for(f"messages.length === 2 && {IDLE}")
    sent = browser.evaluate("sent")
    assert [[m["content"] for m in body["messages"]] for body in sent] == [
        ["one"],
        ["one", "yes", "two"],
        ["three"],
    ]
    assert {(body["max_tokens"], body["temperature"], body["stream"]) for body in sent[:2]} == {
        (7, 0, True)
    }
    assert len({body["request_id"] for body in sent}) == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            {"status": 429, "message": "9 prompts are open", "headers": {"Retry-After": "1"}},
            "The server is busy; try again in 1 second: 9 prompts are open",
        ),
        (
            {"status": 400, "message": "max_tokens must be at least 1"},
            "The server refused the request (HTTP 400): max_tokens must be at least 1",
        ),
        ({"status": 503, "message": "shutting down"}, "(HTTP 503): shutting down"),
        ({"unreachable": True}, "No answer from the server. Is it still running?"),
        ({"chunks": [{"error": {"message": "out of luck"}}]}, "The server failed: out of luck"),
    ],
)
def test_failures_are_said_in_words_and_the_question_is_not_lost(
    browser: Browser, answer: dict[str, Any], words: str
) -> None:
    fake(browser, **answer)
    ask(browser, "hello")
    browser.wait_for("!error.hidden")
    assert words in browser.evaluate("error.innerText")
    assert messages(browser) == [] and browser.evaluate("messages.length") == 0
    assert browser.evaluate("document.getElementById('prompt').value") == "hello"


def test_a_broken_answer_is_kept_and_called_broken(browser: Browser) -> None:
    fake(browser, [delta("The capital of")])
    ask(browser, "hello")
    browser.wait_for("!error.hidden")
    assert "connection broke" in browser.evaluate("error.innerText")
    assert messages(browser)[1] == ["assistant", "The capital of"]
    assert "The stages are not shown: HTTP 404" in browser.evaluate("summary.innerText")


@pytest.mark.parametrize(
    ("reason", "words"),
    [("length", "token limit"), ("error", "failed"), ("fatigue", "Ended: fatigue"), ("stop", "")],
)
def test_how_an_answer_ended_is_said(browser: Browser, reason: str, words: str) -> None:
    fake(browser, [delta("so"), delta("", reason)])
    ask(browser, "hello")
    browser.wait_for(f"messages.length === 2 && {IDLE}")
    note = browser.evaluate("document.querySelector('.note')?.textContent ?? ''")
    assert words in note and bool(words) == bool(note)


@pytest.mark.slow
def test_smollm2_answers_in_the_browser(chromium: str, tmp_path: Path, pulled_model: Path) -> None:
    with spawned_server([]) as url, Browser(chromium, tmp_path) as browser:
        browser.open(url)
        browser.wait_for("model.textContent")
        ask(browser, "What is the capital of France?")
        browser.wait_for(ENDED)
        assert "Paris" in messages(browser)[1][1]
        assert browser.errors == []
