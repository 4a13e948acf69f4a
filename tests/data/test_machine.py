import torch

from dualmcmc.data import machine


def group(folder, limit, used, cached):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 1\n")
    return folder


def test_the_tightest_limit_counts_and_pages_of_files_are_free(tmp_path, monkeypatch):
    free = machine.available_memory()
    assert 0 < free < 1 << 50
    outer, inner = group(tmp_path / "a", "5000", 3000, 999), group(tmp_path / "a" / "b", "4000", 3000, 99)
    assert (machine._left_in(outer), machine._left_in(inner)) == (3000, 1100)
    monkeypatch.setattr(machine, "_groups", lambda: [inner, outer])
    assert machine.available_memory() == 1100
    group(inner, "1000", 3000, 0)
    assert machine.available_memory(torch.device("cpu")) == 0


def test_no_limit_is_no_limit(tmp_path, monkeypatch):
    before = machine.available_memory()
    monkeypatch.setattr(machine, "_groups", lambda: [group(tmp_path / "a", "max", 1, 1), tmp_path / "absent"])
    assert machine.available_memory() > before / 2


def test_bytes_in_words():
    words = [machine.in_words(count) for count in (0, 999, 1500, 2.46e9, 7e12, 7e15)]
    assert words == ["0 bytes", "999 bytes", "1.5 kB", "2.46 GB", "7 TB", "7e+03 TB"]
