import csv
import io

from dualmcmc.paper.experiments import Experiment, Row
from dualmcmc.paper.tables import make_table

EXPERIMENT = Experiment(
    "A <title>",
    ("FID", "IS"),
    (Row("ours", {"FID": "9.26", "IS": "8.55"}, "a"), Row("missing", {"FID": "1"}, "b"), Row("quoted", {"IS": "7"})),
    ("samples",),
    "about | it",
)


def test_table():
    table = make_table(EXPERIMENT, {"a": {"FID": 7.12345, "IS": None, "extra": 3}}, {"a": "5.0 min"}, ["more"])
    assert table.header == ("", "FID, paper", "FID, here", "IS, paper", "IS, here", "extra, here", "trained")
    assert table.rows == (
        ("ours", "9.26", "7.123", "8.55", "–", "3", "5.0 min"),
        ("missing", "1", "–", "–", "–", "–", "quoted"),
        ("quoted", "–", "–", "7", "–", "–", "quoted"),
    )
    assert list(csv.reader(io.StringIO(table.csv()))) == [list(table.header), *map(list, table.rows)]
    assert "| ours | 9.26 | 7.123 | 8.55 |" in table.markdown()
    assert "<h1>A &lt;title&gt;</h1>" in table.html()
    assert table.text()[0] == "A <title>"
    for text in (table.markdown(), table.html(), "\n".join(table.text())):
        assert "about | it" in text
        assert "more" in text


def test_row_with_another_number():
    row = Row("inference", {"MSE": "2"}, "a", {"MSE": "MSE, inference"})
    experiment = Experiment("", ("MSE",), (row, Row("all", {"MSE": "1"}, "a")), ("errors",), "")
    table = make_table(experiment, {"a": {"MSE": 1.5, "MSE, inference": 2.5}}, {"a": ""}, [])
    assert [cells[:3] for cells in table.rows] == [("inference", "2", "2.5"), ("all", "1", "1.5")]
