"""Script drift: text of real languages as it should and should not appear in a reply."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.guards.alarm import Alarm
from minifer.postprocessing.guards.script_drift import ScriptDriftGuard, named_scripts, script_of
from minifer.postprocessing.hooks import HookVerdict
from minifer.text.tokenizer import Tokenizer

ENGLISH = "Why do dogs bark at night?"


def drift(
    reply: str | list[str], prompt: str = ENGLISH, chunk: int = 4, action: str = "stop"
) -> int | None:
    """Characters of the reply up to the chunk that trips the guard."""
    trips: list[tuple[str, str]] = []
    alarm = Alarm("language_drift", "language_drift", action, lambda *trip: trips.append(trip))
    guard, seen = ScriptDriftGuard(alarm, lambda: prompt), 0
    pieces = [reply[i : i + chunk] for i in range(0, len(reply), chunk)]
    for piece in pieces:
        verdict = guard.on_token(0, piece)
        seen += len(piece)
        assert verdict.text == piece
        if trips:
            assert trips[0][0] == "language_drift"
            assert verdict.finish_reason == ("language_drift" if action == "stop" else None)
            return seen
    assert guard.on_finish("end") == "end"
    return None


DRIFTS = {
    "Han": "狗在夜里吠叫是因为它们听到了声音。",
    "Kana": "いぬはよるにほえるのがすきです。",
    "Hangul": "개는 밤에 소리를 들으면 짖습니다.",
    "Cyrillic": "Собаки лают ночью, потому что слышат звуки.",
    "Arabic": "الكلاب تنبح في الليل لأنها تسمع أصواتا.",
    "Hebrew": "כלבים נובחים בלילה כי הם שומעים קולות.",
    "Thai": "สุนัขเห่าในเวลากลางคืนเพราะได้ยินเสียง",
    "Devanagari": "कुत्ते रात में भौंकते हैं क्योंकि वे सुनते हैं",
    "Greek": "Τα σκυλιά γαβγίζουν τη νύχτα γιατί ακούνε.",
}


@pytest.mark.parametrize("script", DRIFTS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_f13_an_english_conversation_that_turns_is_flagged(script: str, chunk: int) -> None:
    start = "Dogs bark because they hear sounds. "
    assert drift(start + DRIFTS[script], chunk=chunk) is not None
    assert drift(start * 20 + DRIFTS[script], chunk=chunk) is not None


@pytest.mark.parametrize("script", ["Han", "Kana"])
def test_f13_han_is_flagged_within_16_tokens_of_single_bytes(script: str) -> None:
    """The worst tokenizer: three tokens a character, the text comes with the last of them."""
    start = "Dogs bark because "
    flagged = drift(start + DRIFTS[script], chunk=1)
    assert flagged is not None
    assert 3 * (flagged - len(start)) <= 16


@pytest.mark.parametrize("script", DRIFTS)
def test_f13_tokens_of_smollm2_until_the_flag(script: str, pulled_model: Path) -> None:
    tokenizer = Tokenizer.from_dir(pulled_model)
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    start = len(tokenizer.encode("Dogs. "))
    pieces = [detokenizer.push(i) for i in tokenizer.encode("Dogs. " + DRIFTS[script])]
    guard = ScriptDriftGuard(Alarm("d", "d", "stop", lambda *_: None), lambda: ENGLISH)
    ended = [guard.on_token(0, piece).finish_reason for piece in pieces].index("d") + 1
    assert ended - start <= (19 if script == "Hebrew" else 16)


@pytest.mark.parametrize("script", DRIFTS)
def test_f13_a_reply_in_the_script_of_the_prompt_is_fine(script: str) -> None:
    assert drift(DRIFTS[script] * 3, prompt=f"Please answer: {DRIFTS[script][:6]}") is None


@pytest.mark.parametrize(
    ("prompt", "script"),
    [
        ("How do you say it in Chinese?", "Han"),
        ("Translate this sentence to Japanese: I like tea.", "Kana"),
        ("I am learning KOREAN.", "Hangul"),
        ("Teach me some hiragana", "Kana"),
        ("Write a short poem in russian", "Cyrillic"),
        ("What is the Arabic alphabet?", "Arabic"),
        ("Say hello in Hindi!", "Devanagari"),
        ("Say hello in ten different languages.", "Han"),
        ("Translate into the mother tongue of Confucius", "Han"),
        ("Which Unicode blocks hold letters?", "Thai"),
        ("Explain kanji radicals", "Han"),
        ("犬はなぜ吠えますか", "Han"),
        ("为什么狗叫", "Kana"),  # within CJK a change of script is no drift
    ],
)
def test_f13_a_reply_that_was_asked_for_is_fine(prompt: str, script: str) -> None:
    assert drift("Of course: " + DRIFTS[script], prompt=prompt) is None


@pytest.mark.parametrize(
    "prompt",
    [
        "Which programming language is best?",
        "You are a helpful large language model. Why do dogs bark?",
        "Write in French about dogs",  # another language, but not another script
        "What did the Romans eat?",
    ],
)
def test_a_prompt_that_only_sounds_like_languages_still_expects_latin(prompt: str) -> None:
    assert drift(DRIFTS["Han"], prompt=prompt) is not None


@pytest.mark.parametrize(
    "reply",
    [
        "The capital of China is Beijing (北京), which means northern capital.",
        "Sun Tzu wrote 孙子兵法 two thousand years ago.",
        "The country (中华人民共和国) was founded in 1949.",
        'The word "собака" means dog, and "الكلب" does too.',
        "Bangkok, or กรุงเทพ, is hot; Leo Tolstoy is Лев Толстой.",
        "Dostoevsky's novel Преступление is long.",
        "The proverb 一石二鸟 is about birds.",
        "Naïve café façades in Łódź, Ångström, Dvořák, İstanbul, Weiß",
        "Let α + β = γ and Δx → 0, so ∑ μᵢ = π·ρ² with θ, φ, ψ, ω ∈ ℝ and ℵ₀",
        "𝑎𝑥² + 𝑏𝑥 + 𝑐 = 0, 𝐀 𝐁 𝐂 𝐃 𝐄",
        "🐶🐕🦮🐩 👨‍👩‍👧‍👦 ✅ → ★★★★★ ┌──┐ ½ € ™",
        "5 µm, 10 Ω, 20 Å, 1ª",
        "｀ＦＵＬＬＷＩＤＴＨ　ｌａｔｉｎ",
    ],
)
def test_f13_names_symbols_accents_and_single_words_are_fine(reply: str) -> None:
    for chunk in (1, 4, 1000):
        assert drift(reply, chunk=chunk) is None


def test_a_language_that_the_reply_announces_is_fine() -> None:
    assert drift("People greet each other. In Japanese: こんにちは、みなさん") is None
    assert drift("The Russian text: Собаки лают ночью, они слышат") is None


def test_single_foreign_characters_all_over_are_a_drift() -> None:
    """What users of DeepSeek-V3 saw (deepseek-ai/DeepSeek-V3#1045)."""
    parts = [f"The dog 的 barks at number {i} and then it 是 sleeps. " for i in range(3)]
    assert drift("".join(parts)) is not None
    assert drift(parts[0] + parts[1]) is None


def test_the_prompt_is_looked_at_only_when_it_matters_and_once() -> None:
    calls = []

    def prompt() -> str:
        calls.append(1)
        return ENGLISH

    guard = ScriptDriftGuard(Alarm("d", "d", "report", lambda *_: None), prompt)
    for piece in ("Dogs", " bark", " at", " naïve", " cats"):
        guard.on_token(0, piece)
    assert not calls
    for piece in (" 狗", " and", " 猫", " or", " 鸟"):
        guard.on_token(0, piece)
    assert len(calls) == 1


def test_report_rings_once_and_ends_nothing() -> None:
    trips: list[str] = []
    alarm = Alarm("language_drift", "language_drift", "report", lambda _, why: trips.append(why))
    guard = ScriptDriftGuard(alarm, lambda: ENGLISH)
    assert [guard.on_token(0, "狗在") for _ in range(50)] == [HookVerdict("狗在")] * 50
    assert trips == ["Han letters in a reply that expects Latin"]


def test_scripts_are_those_of_the_unicode_names() -> None:
    expected = {
        "aéßŁ": "Latin",
        "漢々ㄅ": "Han",
        "あアｱー": "Kana",
        "한ㄱ": "Hangul",
        "я": "Cyrillic",
        "ω": "Greek",
        "ב": "Hebrew",
        "ع": "Arabic",
        "कि"[0]: "Devanagari",
        "ก": "Thai",
        "ა": "Georgian",
        "አ": "Ethiopic",
    }
    for characters, script in expected.items():
        assert {script_of(c) for c in characters} == {script}
    for c in " 1,!🐶½—。、\u200d\n\u0301":
        assert script_of(c) is None, unicodedata.name(c, repr(c))
    assert script_of("ℝ") == script_of("𝑥") == script_of("Ａ") == "Latin"


def test_languages_are_whole_words() -> None:
    assert named_scripts("In Thai and in Greek.") == {"Thai", "Greek"}
    assert named_scripts("Thailander, indochinese, Greeks") == frozenset()
