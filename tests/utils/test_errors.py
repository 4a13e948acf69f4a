from dualmcmc.utils.errors import first_line, format_value, nearest, printable, sanitize


def test_nearest():
    assert nearest("trian", ["train", "sample"]) == " Did you mean 'train'?"
    assert nearest("lr", ["optim.energy.lr"]) == " Did you mean 'optim.energy.lr'?"
    assert nearest("zzz", ["train", "sample"]) == ""


def test_untrusted_text_is_one_short_printable_line():
    assert sanitize("a\x1b[31m\nb") == r"a\x1b[31m\nb"
    assert len(sanitize("x" * 10_000)) < 100
    assert format_value({"a": 1}) == "key: value pairs of 1"
    assert format_value(10**5000) == "a number too long to print"
    assert first_line(ValueError("first.\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"


def test_marks_that_reverse_text_are_escaped():
    text = "a\u202eb\u2066c\x1b[31m\x07\nd é 漢"
    assert printable(text) == "a\\u202eb\\u2066c\\x1b[31m\\x07\nd é 漢"
    assert sanitize("\u202e\u2066") == "\\u202e\\u2066"
