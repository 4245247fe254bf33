"""Scatters in plain text."""

from toolkit.cli.output import PlotPoint, scatter


def test_the_least_and_the_greatest_points_are_in_the_corners():
    lines = scatter([PlotPoint(1, 5, "a"), PlotPoint(100, 9, "b")], x_name="seconds")
    assert lines[0].endswith("b")
    assert lines[0].lstrip().startswith("9 |")
    assert lines[-3].lstrip().startswith("5 |a")
    assert lines[-1].split() == ["1", "seconds", "100"]
    assert max(map(len, lines)) <= 80


def test_latencies_are_spaced_by_their_ratio():
    lines = scatter(
        [PlotPoint(1, 0, "a"), PlotPoint(10, 1, "m"), PlotPoint(100, 0, "b")], x_name="s"
    )
    middle = next(line for line in lines if "m" in line).index("m")
    assert abs((lines[-3].index("a") + lines[-3].index("b")) / 2 - middle) <= 1


def test_later_points_cover_earlier_ones_and_equal_ones_need_no_axis():
    lines = scatter([PlotPoint(2, 3, "a"), PlotPoint(2, 3, "b")], x_name="x")
    assert "".join(lines).count("b") == 1
    assert "a" not in "".join(lines)


def test_nothing_to_show_prints_no_line():
    assert scatter([], x_name="x") == []


def test_it_is_ascii():
    assert all(
        line.isascii()
        for line in scatter([PlotPoint(0.1, 1, "x"), PlotPoint(3, 2, "o")], x_name="x")
    )
