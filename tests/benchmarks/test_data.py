from tests.conftest import TINY


def test_measures_every_source(run_script, tmp_path):
    words = ("digits", *TINY, "--images", 300, "--seconds", 0.05, "--device", "cpu", "--folder", tmp_path / "scratch")
    result = run_script("data.py", *words, "--json").json
    rates = result["loading_images_per_second"]
    assert list(rates) == ["packed file", "RAM", "device memory", "decoding PNG", "decoding JPEG"]
    assert all(rate > 0 for rate in rates.values())
    assert result["dataset_bytes"] == 300 * 64
    assert result["command"].split()[0].endswith("data.py")
    assert 0 <= result["training_streamed"]["waiting_fraction"] < 1
    assert list((tmp_path / "scratch").iterdir()) == []


def test_table(run_script):
    answer = run_script("data.py", *TINY, "data.size=8", "--images", 100, "--seconds", 0.05, "--device", "cpu")
    assert answer.code == 0, answer.err
    assert "100 images of 8x8, 19.2 kB" in answer.out  # RGB by default
    for text in ("packed file", "decoding JPEG", "training while streaming", "peak memory"):
        assert text in answer.out
