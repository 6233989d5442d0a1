"""`minifer sim` between the command line, the simulator and its files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minifer.cli import main
from minifer.cli.parser import ENGINE_HELP
from minifer.cli.sim_traffic import SIMULATED
from minifer.routing.policies import POLICIES
from minifer.simulation.steps.published import PUBLISHED_STEPS
from minifer.simulation.workloads.named import WORKLOADS

Capture = pytest.CaptureFixture[str]
FEW = ["--requests", "40"]
MOONCAKE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 8]}
{"timestamp": 0, "input_length": 1600, "output_length": 9, "hash_ids": [0, 7, 9, 10]}
{"timestamp": 3000, "input_length": 700, "output_length": 4, "hash_ids": [1, 2]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "trace.jsonl").write_text(MOONCAKE)
    return tmp_path / "trace.jsonl"


def test_a_run_prints_a_table_and_writes_what_it_prints(tmp_path: Path, capsys: Capture) -> None:
    out, picture = tmp_path / "run.json", tmp_path / "run.svg"
    files = ["--json", str(out), "--plot", str(picture)]
    assert main(["sim", "run", *FEW, "--rate", "2", "--slo", "ttft=1", "tpot=0.1", *files]) == 0
    printed = capsys.readouterr().out
    assert "simulated: azure-short on 1 mixed node, steps distserve-opt-13b" in printed
    for word in ("TTFT", "longest gap", "40 of 40 requests", "goodput", "starvation", "mixed0"):
        assert word in printed
    written = json.loads(out.read_text())
    assert written["simulated"] is True
    (figures,) = written["rates"].values()
    assert figures["num_finished"] == 40 and figures["saturation"]["unstable"] is False
    assert figures["attainment"]["low"] <= figures["attainment"]["value"]
    assert "requests in the system" in picture.read_text()


def test_the_same_command_prints_the_same(capsys: Capture) -> None:
    command = ["sim", "run", *FEW, "--nodes", "2", "--router", "power_of_two", "--seed", "3"]
    printed = []
    for _ in range(2):
        assert main(command) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_several_rates_are_lines_and_one_past_saturation_is_flagged(
    tmp_path: Path, capsys: Capture
) -> None:
    picture = tmp_path / "rates.svg"
    command = ["sim", "run", "--requests", "400", "--rate", "0.5,20", "--slo", "ttft=1"]
    assert main([*command, "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "PAST SATURATION" not in lines[2] and lines[2].split()[0] == "0.5"
    assert "PAST SATURATION" in lines[3] and lines[3].split()[0] == "20"
    assert "past saturation" in picture.read_text()


def test_prefill_and_decode_apart(capsys: Capture) -> None:
    roles = ["--roles", "prefill=1,decode=1", "--link", "3", "--rate", "1"]
    assert main(["sim", "run", *FEW, *roles]) == 0
    printed = capsys.readouterr().out
    assert "on 1 prefill, 1 decode nodes" in printed and "prefill0" in printed
    assert main(["sim", "run", *FEW, *roles, "--steps", "fixed:0.01"]) == 0
    assert "KV moves at no cost" in capsys.readouterr().err


def test_what_is_printed_says_what_it_is(tmp_path: Path, capsys: Capture) -> None:
    assert main(["sim", "run", *FEW, "--roles", "prefill=1", "--rate", "1"]) == 0
    assert "no node decodes: each request ends with its first token" in capsys.readouterr().err
    apart = ["--roles", "prefill=1,decode=1", "--link", "3", "--store-tokens", "1024"]
    assert main(["sim", "run", *FEW, *apart, "--rate", "1,2", "--slo", "ttft=9"]) == 0
    printed = capsys.readouterr().out
    assert "link 3 GB/s, store 50 GB/s" in printed
    assert "queue: requests that wait, mean of the second half" in printed
    assert "100.0% [92.8%, 100.0%]" in printed  # 40 of 40: 1 - 0.05 ** (1 / 40) may miss
    out = tmp_path / "one.json"
    assert main(["sim", "run", "--requests", "1", "--slo", "ttft=9", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 requests that came at once" in printed
    assert "nan" not in printed and "inf" not in printed
    (figures,) = json.loads(out.read_text())["rates"].values()
    assert figures["offered"] is None and figures["goodput"] is None
    assert main(["sim", "workload", "chat", "--requests", "20"]) == 0
    assert " new sessions a second over " in capsys.readouterr().out


def test_the_names_of_steps_and_routers_are_listed(capsys: Capture) -> None:
    assert main(["sim", "run", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in PUBLISHED_STEPS)
    assert all(f"  {name}" in printed for name in POLICIES)


def test_capacity_is_searched(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "capacity.json"
    search = ["--capacity", "0.9", "--slo", "ttft=3", "--runs", "1", "--processes", "1"]
    queue = ["--workload", "azure-code", "--steps", "fixed:1", "--max-num-seqs", "1"]
    assert main(["sim", "run", *FEW, *queue, *search, "--rate", "2", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "within the SLO" in printed and "   tried    within" in printed
    assert ("given up: before the end" in printed) == (" given up\n" in printed)
    found = json.loads(out.read_text())["capacity"]
    assert len(found["probes"]) > 0 and found["rate"] < 2


def test_a_store_brings_what_a_workload_takes_for_stored(capsys: Capture) -> None:
    command = ["sim", "run", "--workload", "cold-warm", "--steps", "cold-warm", *FEW]
    assert main([*command, "--rate", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert "cold" in printed and "warm" in printed
    (hits,) = re.findall(r"hit rate +([0-9.]+)%", printed)
    assert 80 < float(hits) < 97  # 92 % of the contexts, 97 % of what a warm one holds


def test_a_trace_is_replayed_and_said_to_be_none_of_the_known(trace: Path, capsys: Capture) -> None:
    assert main(["sim", "run", "--trace", str(trace), "--steps", "fixed:0.1"]) == 0
    captured = capsys.readouterr()
    assert "none of the known public files" in captured.err
    assert "3 of 3 requests" in captured.out
    assert "hit rate      30.8%" in captured.out  # 2 blocks of 512 tokens, of 3,330 tokens


def test_workloads_are_listed_and_described(tmp_path: Path, trace: Path, capsys: Capture) -> None:
    assert main(["sim", "workload"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in WORKLOADS)
    rows, figures = tmp_path / "rows.jsonl", tmp_path / "w.json"
    files = ["--out", str(rows), "--json", str(figures)]
    assert main(["sim", "workload", "chat", "--requests", "30", *files]) == 0
    assert "of 30 sessions" in capsys.readouterr().out
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert json.loads(figures.read_text())["num_requests"] == len(lines)
    assert lines[0]["prompt_len"] > 0 and lines[0]["tenant"].startswith("tenant")
    assert main(["sim", "workload", "--trace", str(trace)]) == 0
    assert "finds 22.2% of the blocks" in capsys.readouterr().out  # 2 of 3 + 4 + 2


def test_a_workload_that_was_written_is_a_trace(tmp_path: Path, capsys: Capture) -> None:
    figures = []
    for name, count in (("mooncake-conversation", "50"), ("chat-open", "10"), ("chat", "10")):
        out, read = str(tmp_path / f"{name}.jsonl"), ["--requests", count]
        assert main(["sim", "workload", name, *read, "--out", out]) == 0
        figures = capsys.readouterr().out.splitlines()[2:]
        if name == "chat":
            break
        assert main(["sim", "workload", "--trace", out]) == 0
        again = capsys.readouterr().out.splitlines()[2:]
        assert again == figures
    assert main(["sim", "run", "--trace", out]) != 0
    error = capsys.readouterr().err
    assert "line 2: this turn waits for the answer before it" in error


def test_record_fit_validate(tmp_path: Path, model_folder: Path, capsys: Capture) -> None:
    log, steps = str(tmp_path / "log.jsonl"), str(tmp_path / "steps.json")
    engine = ["--model", str(model_folder), "--max-num-seqs", "4", "--num-kv-blocks", "200"]
    traffic = ["--requests", "12", "--rate", "30", "--cpu-clock"]
    assert main(["sim", "record", log, *engine, *traffic]) == 0
    assert "12 requests in" in capsys.readouterr().out
    assert main(["sim", "fit", log, "--json", steps]) == 0
    assert "a prompt token" in capsys.readouterr().out
    assert main(["sim", "run", "--steps", steps, "--workload", "short", *FEW]) == 0
    assert f"steps {steps}" in capsys.readouterr().out
    report = tmp_path / "validation.json"
    assert main(["sim", "validate", log, "--json", str(report)]) in (0, 1)  # times are real here
    printed = capsys.readouterr().out
    for metric in ("TTFT, fitted to all steps", "TPOT", "E2E, first half on second"):
        assert metric in printed
    errors = json.loads(report.read_text())["errors"]
    assert errors["ttft"]["count"] == 12
    other = str(tmp_path / "other.json")
    assert main(["sim", "validate", log, "--max-num-seqs", "1", "--json", other]) in (0, 1)
    alone = json.loads(Path(other).read_text())["errors"]
    assert alone["ttft"]["simulated"] > errors["ttft"]["simulated"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "--rate", "0"], "must be numbers above 0 such as 1,2,4"),
        (["run", "--rate", "x"], "must be numbers above 0 such as 1,2,4"),
        (["run", "--workload", "poems"], "workload must be one of azure-code"),
        (["run", "--workload", "chat", "--trace", "t"], "--workload and --trace exclude"),
        (["run", "--max-total-len", "5"], "--max-total-len is for a --trace"),
        (["run", "--requests", "0"], "--requests must be at least 1"),
        (["run", "--nodes", "0"], "--nodes must be at least 1"),
        (["run", "--nodes", "1", "--roles", "mixed=1"], "--nodes and --roles exclude each other"),
        (["run", "--roles", "mixed"], "--roles must be ROLE=N"),
        (["run", "--roles", "cook=2"], "--roles must be ROLE=N"),
        (["run", "--roles", "decode=2"], "nodes must have one that prefills"),
        (["run", "--steps", "fast"], "steps must be a file, fixed:SECONDS"),
        (["run", "--router", "magic"], "router must be one of"),
        (["run", "--slo", "speed=1"], "slo must be NAME=SECONDS"),
        (["run", "--capacity", "0.9"], "--capacity needs --slo"),
        (["run", "--capacity", "2", "--slo", "ttft=1"], "--capacity must be a share"),
        (["run", "--roles", "prefill=1,decode=1", "--link", "-1"], "--link must be above 0 GB/s"),
        (["run", "--link", "3"], "--link needs --roles with decode nodes"),
        (["run", "--roles", "prefill=2", "--decode-steps", "fixed:1"], "--decode-steps needs"),
        (["run", "--decode-router", "random"], "--decode-router needs"),
        (["run", "--store", "3"], "--store needs a store: give --store-tokens"),
        (["run", "--store-tokens", "512", "--store", "0"], "--store must be above 0 GB/s"),
        (["run", "--kv-bytes", "1"], "--kv-bytes needs --roles with decode nodes, or a store"),
        (["run", "--roles", "mixed=1,decode=1"], "decode nodes need prefill nodes"),
        (["run", "--runs", "2"], "--runs is for a search"),
        (["run", "--processes", "2"], "--processes is for a search"),
        (["run", "--reject", "nan"], "must be above 0 seconds, got nan"),
        (["run", "--reject", "-1"], "must be above 0 seconds, got -1"),
        (["run", "--block-size", "0"], "block_size must be an integer of at least 1, got 0"),
        (["run", "--seed", "-1", "--slo", "ttft=1"], "--seed must be at least 0, got -1"),
        (["run", "--slo", "ttft=1", "ttft=2"], "slo must name each limit once"),
        (["run", "--steps", "roofline:llama-8b:H100:1:1.5"], "devices must be an integer"),
        (["run", "--steps", "roofline:llama-8b:H100:1:inf"], "devices must be an integer"),
        (["workload", "--rate", "3"], "--rate needs a workload's NAME or a --trace"),
        (["workload", "--json", "w.json"], "--json needs a workload's NAME or a --trace"),
        (["workload", "chat", "--seed", "-1"], "--seed must be at least 0"),
        (["run", "--warmup", "-1"], "--warmup must be at least 0"),
        (["run", "--num-kv-blocks", "2"], "raise num_kv_blocks"),
        (["run", "--block-size", "300"], "block_size must divide 512"),
        (["run", "--warmup", "1e9"], "leaves none of 1000 requests"),
        (["run", "--plot", "x.txt"], "--plot must end in"),
        (["run", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["workload", "poems"], "workload must be one of"),
        (["record", "/no/such/folder/log"], "there is no folder"),
        (["fit", "no-such-log"], "No such file"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], why: str, capsys: Capture) -> None:
    assert main(["sim", *arguments]) != 0
    printed = capsys.readouterr()
    assert why in printed.err and "MINIFER_DEBUG" not in printed.err
    assert printed.out == ""  # no title of a run that does not come


def test_what_a_simulated_engine_can_have_are_options_of_the_engine() -> None:
    assert set(SIMULATED) <= set(ENGINE_HELP)
