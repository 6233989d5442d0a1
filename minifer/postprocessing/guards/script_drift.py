"""Script drift: an English conversation that turns to Han characters, or any other script.

It is what users see when a KV slot of another request is read, when an approximate top-k lets an
improbable token through (Anthropic, "A postmortem of three recent issues", September 2025: Thai
and Chinese characters in English answers), or when a model was trained badly
(deepseek-ai/DeepSeek-V3#1045: single Chinese characters in English chats). The guard cannot tell
these apart; it says that something happened that nobody asked for.

Expected are: Latin, the scripts of the prompt, the scripts of every language that the prompt or
the reply so far names ("in Japanese", "kanji"), and anything at all where the prompt speaks of
translating or of languages without naming one. It is judged from words; a language asked for in
another way ("as they say in Osaka") is not seen, nor is a drift within one script (to French).

Two rules trip the guard:

- a *run*: letters of an unexpected script with no expected word between them, `MAX_RUN` of Chinese,
  Japanese or Korean, `MAX_SPACELESS_RUN` of scripts such as Thai that set no spaces, and
  `MAX_ALPHABET_RUN` in at least two words of others. Names, single words and symbols of
  mathematics are shorter. A run that opens in brackets or quotation marks explains a word and
  may be `GLOSS` times as long;
- *strays*: `MAX_STRAYS` separate runs, outside brackets and quotation marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from minifer.postprocessing.guards.alarm import Alarm
from minifer.postprocessing.hooks import HookVerdict

MAX_RUN = 5  # a name or a proverb of four characters is no drift; 5 are at most 15 byte tokens
MAX_SPACELESS_RUN = 8
MAX_ALPHABET_RUN = 12
MAX_STRAYS = 5
GLOSS = 4
MIN_WORD = 3  # letters from which an alphabet's letters are a word and not symbols: α, Δx
TAIL = 200  # characters of the reply in which a language may have been announced

CJK = frozenset({"Han", "Kana", "Hangul"})
SPACELESS = frozenset({"Thai", "Lao", "Khmer", "Myanmar", "Tibetan"})
_OPENING = "([{<\"'“‘«「『（【*`:"
# How Unicode names begin, where that is not the name of the script.
_SCRIPT_OF_NAME = {"CJK": "Han", "IDEOGRAPHIC": "Han", "BOPOMOFO": "Han", "HIRAGANA": "Kana"}
_SCRIPT_OF_NAME |= {"KATAKANA": "Kana", "KATAKANA-HIRAGANA": "Kana", "HANGUL": "Hangul"}
# Words by which prompts ask for scripts other than Latin.
_LANGUAGES = {
    "Han Kana": "japanese japan kanji hiragana katakana kana haiku anime manga",
    "Han": "chinese china mandarin cantonese taiwanese taiwan hanzi pinyin hsk hokkien",
    "Hangul Han": "korean korea hangul hanja",
    "Cyrillic": "russian russia ukrainian bulgarian serbian belarusian macedonian kazakh kyrgyz "
    "mongolian tajik cyrillic slavic",
    "Arabic": "arabic persian farsi urdu pashto uyghur kurdish sindhi quran qur'an",
    "Hebrew": "hebrew yiddish torah",
    "Greek": "greek greece",
    "Devanagari": "hindi sanskrit marathi nepali devanagari",
    "Bengali": "bengali bangla assamese",
    "Thai": "thai thailand",
    "Lao": "lao laotian",
    "Khmer": "khmer cambodian",
    "Myanmar": "burmese myanmar",
    "Tamil": "tamil",
    "Telugu": "telugu",
    "Kannada": "kannada",
    "Malayalam": "malayalam",
    "Gujarati": "gujarati",
    "Gurmukhi": "punjabi gurmukhi",
    "Sinhala": "sinhala sinhalese",
    "Tibetan": "tibetan",
    "Georgian": "georgian",
    "Armenian": "armenian",
    "Ethiopic": "amharic tigrinya ethiopic",
}
_SCRIPTS_OF_WORD = {w: frozenset(s.split()) for s, ws in _LANGUAGES.items() for w in ws.split()}
_WORD = re.compile(r"[a-z']+")
# Something is asked about languages, but which?
_ANY_LANGUAGE = re.compile(
    r"\b(?:translat\w*|multilingual|bilingual|unicode|(?<!programming )languages?(?! models?\b))\b"
)


@lru_cache(maxsize=8192)
def script_of(character: str) -> str | None:
    """The script of a letter ("Latin", "Han", "Kana", "Cyrillic", …); None for what is none.

    From the first word of its Unicode name, after compatibility forms (ℝ, 𝑥, ｶ) are undone.
    """
    character = unicodedata.normalize("NFKC", character)[:1]
    if not (character.isalpha() or unicodedata.category(character).startswith("M")):
        return None
    name = unicodedata.name(character, "").split(" ")[0]
    if name in ("COMBINING", "VARIATION", "MODIFIER", ""):
        return None
    return _SCRIPT_OF_NAME.get(name, name.capitalize())


def named_scripts(text: str) -> frozenset[str]:
    """Scripts of the languages that an English text names."""
    words = set(_WORD.findall(text.casefold())) & _SCRIPTS_OF_WORD.keys()
    return frozenset().union(*(_SCRIPTS_OF_WORD[word] for word in words))


def expected_scripts(prompt: str) -> frozenset[str] | None:
    """Scripts that a reply to this prompt may be written in; None when it may be any."""
    if _ANY_LANGUAGE.search(prompt.casefold()):
        return None
    scripts = {"Latin", *named_scripts(prompt), *map(script_of, set(prompt))} - {None}
    if scripts & CJK:  # Japanese mixes two of them, names cross between all
        scripts |= CJK
    return frozenset(scripts)  # type: ignore[arg-type]


class ScriptDriftGuard:
    """Trips when a reply is written in a script that was neither in the prompt nor asked for.

    prompt_text: gives the prompt; called when the first letter outside Latin appears.
    """

    def __init__(self, alarm: Alarm, prompt_text: Callable[[], str]) -> None:
        self._alarm = alarm
        self._prompt_text = prompt_text
        self._expected: frozenset[str] | None = frozenset({"Latin"})
        self._asked = False  # whether the prompt was looked at
        self._tail = ""  # of the reply
        self._script: str | None = None  # of the current run of unexpected letters
        self._run = 0  # letters that count
        self._words = 0
        self._gloss = False
        self._word = 0  # letters of the word that is being written
        self._word_is_expected = True
        self._num_strays = 0

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        if self._alarm.rung or self._expected is None or not text:
            return HookVerdict(text)
        if text.isascii() and self._script is None:
            self._word = 0
            self._tail = (self._tail + text)[-TAIL:]
            return HookVerdict(text)
        for character in text:
            if self._is_drift(character):
                return self._alarm.ring(text, self._reason())
            self._tail += character
        self._tail = self._tail[-TAIL:]
        return HookVerdict(text)

    def on_finish(self, text: str) -> str:
        return text

    def _is_drift(self, character: str) -> bool:
        """Take one character; True when it is one too many."""
        script = script_of(character)
        if script is None:
            self._word = 0
            return False
        expected = self._is_expected(script)
        self._word = self._word + 1 if expected is self._word_is_expected else 1
        self._word_is_expected = expected
        if expected:
            if self._word == 2:  # a word, not the x of an equation
                self._end_run()
            return False
        return self._count(script)

    def _is_expected(self, script: str) -> bool:
        if self._expected is None or script in self._expected:
            return True
        if self._script is None:  # a new run
            if not self._asked:
                self._asked = True
                self._expected = expected_scripts(self._prompt_text())
            if self._expected is not None:  # has the reply announced it?
                self._expected |= named_scripts(self._tail)
        return self._expected is None or script in self._expected

    def _count(self, script: str) -> bool:
        if self._script is None:
            self._script = script
            self._gloss = self._tail.rstrip(" ")[-1:] in set(_OPENING)
        if script in CJK or script in SPACELESS:
            self._run += 1
            limit = MAX_RUN if script in CJK else MAX_SPACELESS_RUN
        else:
            if self._word < MIN_WORD:
                return False
            self._run += MIN_WORD if self._word == MIN_WORD else 1
            self._words += self._word == MIN_WORD
            limit = MAX_ALPHABET_RUN if self._words > 1 else 3 * MAX_ALPHABET_RUN
        if self._gloss:
            return self._run >= GLOSS * limit
        return self._run >= limit or self._num_strays + 1 >= MAX_STRAYS

    def _end_run(self) -> None:
        self._num_strays += self._run > 0 and not self._gloss
        self._script, self._run, self._words = None, 0, 0

    def _reason(self) -> str:
        if self._run >= MAX_RUN:
            return f"{self._script} letters in a reply that expects {self._names()}"
        return f"stray {self._script} letters in a reply that expects {self._names()}"

    def _names(self) -> str:
        return ", ".join(sorted(self._expected or ()))
