"""The benchmark of whole models on the CPU: what it records where transformers runs out of memory, and its status."""

import json
import sys
import weakref
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import drop_ins


def test_what_ran_out_of_memory_is_free_when_ours_is_timed(monkeypatch):
    held = []

    def plain():
        scores = torch.ones(5)
        held.append(weakref.ref(scores))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB\nmore")

    free = []
    runs = {"ours": lambda: free.append(not held or held[-1]() is None), "theirs": plain}
    monkeypatch.setitem(drop_ins.PASSES, "training step", lambda model, arguments: runs[model.name])
    ours, theirs = torch.nn.Module(), torch.nn.Module()
    ours.name, theirs.name = "ours", "theirs"
    found = drop_ins.measured(theirs, ours, "training step", {}, "cpu")
    assert found["transformers_error"] == "CUDA out of memory. Tried to allocate 12 GiB"
    assert {"tilewise_ms", "tilewise_mib"} < set(found)
    assert "transformers_ms" not in found
    assert len(free) > 2
    assert all(free)


@pytest.mark.parametrize(("seconds", "status"), [("600", 0), ("-1", 1)])
def test_what_has_no_time_makes_the_status_1(monkeypatch, tmp_path, seconds, status):
    out = tmp_path / "drop_ins.json"
    monkeypatch.setattr(drop_ins, "measured", lambda *arguments: {"tilewise_ms": 1.0})
    words = ["--models", "wav2vec2-bert", "--layers", "1", "--lengths", "16", "--tokens", "16", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["drop_ins.py", *words, "--seconds", seconds, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        drop_ins.main()
    assert ended.value.code == status
    _, *records = json.loads(out.read_text())
    assert [record.get("error") for record in records] == [None if status == 0 else "no time left"] * 2
