from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.journal import Journal, read


def test_lines_past_the_resumed_state_are_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    journal = Journal(folder, 0)
    journal.event("start", 0, device="cpu")
    for images in (10, 20, 30):
        journal.record({"images": images, "loss": float("nan") if images == 30 else 1.0})
    journal.close()
    with open(folder.log, "a") as file:
        file.write('{"kind": "tra')
    assert [entry.get("images") for entry in read(folder.log)] == [0, 10, 20, 30]
    assert read(folder.log)[-1]["loss"] == "nan"
    journal = Journal(folder, 20)
    journal.record({"images": 25, "loss": 1.0})
    journal.close()
    assert [entry.get("images") for entry in read(folder.log)] == [0, 10, 20, 25]


def test_no_log_no_lines(tmp_path):
    assert read(tmp_path / "absent.jsonl") == []


def test_what_is_no_line_of_the_log_is_passed_over(tmp_path):
    lines = ['{"images": 1}', '{"images": null}', '{"images": "x"}', "[" * 100_000, "7", "{", '{"images": 2}']
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert [entry["images"] for entry in read(tmp_path / "log.jsonl")] == [1, 2]
