"""benchmarks/all.py reads its figures from what the benchmarks print; here from output that they did print."""

import importlib.util
import pathlib

from maelm_jax import gin_files

HERE = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
STEP = """device                      1 x cpu, float32
step                        2296.1 ms (median of 6; 2201.0 to 2395.1); first 7.1 s
tokens/s                    1,784
share                       53.5%
peak memory                 1.38 GiB
"""
TORCH = """step          tokens/s     slowest     fastest   ours is
ours             1,921       1,900       1,950     1.00x
gathered         1,795       1,700       1,800     1.07x
hidden           1,887       1,800       1,900     1.02x
"""


def test_all_makes_one_table_of_what_was_printed_and_says_what_was_not_measured():
    spec = importlib.util.spec_from_file_location("all", HERE / "all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    commands, measures = module.plan(("tiny", "base"), "books/*.txt", with_torch=True)
    for command in commands.values():
        assert (HERE / command[0]).is_file()
        for flag in command[1:]:
            if flag.startswith("--gin_file="):
                gin_files.load([flag.removeprefix("--gin_file=")])
    outputs = {"step-tiny": STEP, "torch-tiny-0.0": TORCH, "startup": "cold cache: 31.2 s to\nwarm cache: 12.5 s to\n"}
    text = module.table(commands, measures, outputs)
    figures = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")}
    assert figures["tiny: tokens/s"] == "1,784" and figures["tiny: peak memory"] == "1.38 GiB"
    assert figures["tiny: against the same step in PyTorch, attention dropout 0.0"] == "1.07x"
    assert figures["tiny: against RobertaModel and a mask, attention dropout 0.0"] == "1.02x"
    assert figures["tiny: against the same step in PyTorch, attention dropout 0.1"] == "not measured"
    assert "- torch-tiny-0.1: `benchmarks/against_torch.py --gin_file=benchmarks/shapes/tiny.gin --gin.Model.attention_dropout=0.1 " in text
    assert figures["the same, warm cache"] == "12.5" and figures["base: tokens/s"] == "not measured"
    assert "1 x cpu, float32" in text.splitlines()[0]
    without, _ = module.plan(("tiny",), None, with_torch=False)
    assert not any(name.startswith("torch") for name in without)
    assert "needs PyTorch" in module.table(without, measures, {})
