"""Claims that need no simulator: golden values, and what they must say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from claim_helpers import check_complete, found

from minifer.claims import energy, power, rare_bugs, reload
from minifer.claims.claim import Settings
from minifer.claims.energy import joules_a_token
from minifer.claims.shapes import LLAMA_8B, LLAMA_70B
from minifer.perf.costs import num_parameters

ARITHMETIC = ("rare-bugs", "speed-of-light", "launch-overhead", "reload", "energy")


@pytest.mark.parametrize("name", ARITHMETIC)
def test_nothing_is_missing(name: str) -> None:
    check_complete(name, found(name))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_another_seed_draws_anew_and_says_the_same(name: str) -> None:
    first, second = found(name), found(name, seed=1)
    assert first.breaking == second.breaking
    if name != "energy" or not power.readable():  # what is measured differs from run to run
        assert first == found.__wrapped__(name)


# -- rare bugs


def test_f14_of_the_claim() -> None:
    values = found("rare-bugs").values
    assert values["trials_for_95_percent"] == 299_572
    assert values["chance_of_1000_trials"] == pytest.approx(0.00995, abs=1e-5)  # one percent
    assert values["incidents_a_day"] == pytest.approx(10_000)
    assert values["rate_bound"] == pytest.approx(1e-5, rel=1e-5)
    assert values["rule_of_three"] == pytest.approx(3 / 299_572)
    assert values["seconds_of_production"] == pytest.approx(25.88, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_drawn_campaigns_agree_with_the_closed_form(seed: int) -> None:
    drawn = found("rare-bugs", seed).tables[0].rows
    for trials, exact, seen, *_ in drawn:
        error = (exact * (1 - exact) / rare_bugs.CAMPAIGNS) ** 0.5
        assert abs(float(seen) - float(exact)) <= 5 * error + 1e-12, trials


def test_repeats_of_a_prompt_are_no_trials() -> None:
    values = found("rare-bugs").values
    assert values["chance_with_repeats"] == pytest.approx(1 - (1 - 1e-5) ** 299, rel=1e-9)
    assert rare_bugs.chance_with_repeats(299_572, 1) == pytest.approx(0.95, abs=1e-6)


# -- speed of light, launches


def test_p01_both_published_shares_in_microseconds() -> None:
    values = found("speed-of-light").values
    assert values["weight_gb"] == pytest.approx(2.47, abs=0.005)
    assert values["floor_us"] == pytest.approx(738, rel=0.002)
    assert values["talk_us"] == pytest.approx(1025, rel=0.002)
    assert values["post_us"] == pytest.approx(946, rel=0.002)


def test_only_one_of_the_shares_is_under_a_millisecond() -> None:
    values = found("speed-of-light").values
    assert values["post_us"] < 1000 < values["talk_us"]
    assert 0.72 < values["least_share_for_1_ms"] < 0.78


def test_a_faster_chip_is_farther_from_its_limit() -> None:
    values = found("speed-of-light").values
    assert 0.45 < values["b200_share_low"] < values["b200_share_high"] < 0.55


def test_a_long_context_puts_the_floor_above_the_published_step() -> None:
    values = found("speed-of-light").values
    context, byte_us = values["breaking_context"], 1e6 / 3.35e12
    weights = values["weight_gb"] * 1e9
    assert (weights + context * 32_768) * byte_us >= values["post_us"]
    assert (weights + (context - 1) * 32_768) * byte_us < values["post_us"]
    assert 20_000 < context < 23_000


def test_p02_p03_launches() -> None:
    values = found("launch-overhead").values
    assert values["launches_us"] == pytest.approx(145.6)
    assert values["share_of_floor"] == pytest.approx(0.197, abs=0.002)
    assert values["floor_70b_ms"] == pytest.approx(5.3, abs=0.05)
    assert values["share_of_published_70b"] == pytest.approx(0.176, abs=0.001)


def test_launches_hurt_small_steps_only_and_do_not_explain_the_rest() -> None:
    values = found("launch-overhead").values
    assert values["share_8b_prefill"] < values["share_8b_batch_64"] < 0.05
    assert values["gap_explained_by_launches"] < 0.05


# -- reload


def test_k01_of_the_claim() -> None:
    values = found("reload").values
    assert values["mooncake_a800_gb_s"] == pytest.approx(5.86, abs=0.005)
    assert values["mooncake_h800_gb_s"] == pytest.approx(18.57, abs=0.005)


def test_break_even_lies_between_the_tiers_on_gpus_and_below_all_on_a_cpu() -> None:
    values = found("reload").values
    slow, nvme = (reload.TIERS[name] / 1e9 for name in ("one slow disk", "one NVMe"))
    assert slow < values["break_even_8b_gb_s"] < nvme < values["break_even_70b_gb_s"]
    assert values["break_even_cpu_gb_s"] < slow / 10
    assert 2.6 < values["break_even_8b_gb_s"] < 6


def test_faster_machines_need_faster_tiers() -> None:
    small = reload.Machine("", LLAMA_8B, 1e14)
    fast = reload.Machine("", LLAMA_8B, 2e14)
    assert fast.break_even(8192) == pytest.approx(2 * small.break_even(8192))
    assert small.break_even(32_768) < small.break_even(1024)  # attention grows faster than KV


# -- energy


def test_joules_at_the_data_sheets_limits() -> None:
    """16.06 GB at 3.35 TB/s and 700 W; the floor of any step at batch 1."""
    values = found("energy").values
    assert values["j_batch_1_full_bandwidth"] == pytest.approx(3.36, abs=0.01)
    assert values["j_batch_1"] > values["j_batch_1_full_bandwidth"]


def test_the_model_is_near_what_was_measured_at_batch_64() -> None:
    """ML.ENERGY, Llama 3.1 8B on an H100: 0.12 and 0.20 J a token, by software version."""
    assert 0.10 < found("energy").values["j_batch_64"] < 0.25


def test_batch_load_and_boundary_each_change_it() -> None:
    values = found("energy").values
    assert values["batch_factor"] > 10
    assert values["load_factor"] == pytest.approx(1.9)  # nine tenths of the time at a tenth
    assert values["boundary_factor"] == pytest.approx(2.4)


def test_chips_in_parallel_use_the_same_energy() -> None:
    ratio = joules_a_token(LLAMA_70B, 1) / joules_a_token(LLAMA_8B, 1)
    assert ratio == pytest.approx(num_parameters(LLAMA_70B) / num_parameters(LLAMA_8B), rel=0.01)


def zone(root: Path, name: str, microjoules: int, limit: int = 999_999) -> Path:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")
    return folder


def test_counters_of_all_packages_are_added_and_may_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 900_000)
    zone(tmp_path, "intel-rapl:1", 100)
    zone(tmp_path, "intel-rapl:0:0", 5)  # a part of package 0

    def work() -> None:
        zone(tmp_path, "intel-rapl:0", 100_000)  # 200,000 further, over the end
        zone(tmp_path, "intel-rapl:1", 300_100)
        zone(tmp_path, "intel-rapl:0:0", 77)

    assert power.readable(tmp_path)
    assert power.measure(work, tmp_path).joules == pytest.approx(0.5)


def test_without_a_counter_nothing_is_measured(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0:0", 5)
    assert not power.readable(tmp_path)
    with pytest.raises(RuntimeError, match="no energy counter is readable"):
        power.measure(lambda: None, tmp_path)


def test_this_machine_is_measured_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def measure(work: Callable[[], object]) -> power.Energy:
        served.append(work())
        idle = len(served) == 1
        return power.Energy(1.0, 1.0) if idle else power.Energy(8.0, 2.0)

    monkeypatch.setattr(power, "readable", lambda: True)
    monkeypatch.setattr(power, "measure", measure)
    for name, value in (
        ("HERE_BATCH", 2),
        ("HERE_TOKENS", 4),
        ("HERE_ROUNDS", 1),
        ("HERE_IDLE", 0),
    ):
        monkeypatch.setattr(energy, name, value)
    said, values = energy.measured_here()
    assert values == {"here_gross_j": 1.0, "here_net_j": 0.75}  # 8 J, 2 of them idle, 8 tokens
    assert "RAPL" in said and "1.0000 J" in said and "0.7500" in said


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        Settings(seed=-1)
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        Settings(processes=0)
