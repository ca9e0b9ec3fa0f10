"""What a site answers to a job of statistics: sums, noise, and columns it lacks."""

import math
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.data.datasets import as_dataset
from clients.data.tables import Table as Rows, Words, words_of
from clients.privacy.questions import exact_moments, note_places, note_question
from clients.privacy.site_memory import InMemory
from clients.statistics.columns import read
from clients.statistics.small_cells import hide_small
from clients.statistics.sums import sums_of
from federation.errors import CorruptObject, JobError, SiteError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.statistics_checks import table
from federation.job.statistics_table import Table
from privacy.dp import accountant
from privacy.dp.curve_tests import independent
from privacy.dp.tables import mechanism_of

SITE = SiteId("clinic")
PRIVATE = {"differential_privacy": {"unit": "record", "target_epsilon": 1.0}}
AGE = {"names": ["age"], "low": 0.0, "high": 100.0, "unit": "years"}
NUMBERS = {"names": ["x", "y"], "low": -2.0, "high": 2.0, "bins": 8, "quantiles": [0.5]}
SEX = {"names": ["sex"], "categories": ["f", "m"]}


def asked(*columns: dict[str, Any], **tables: Any) -> Table:
    document = {"name": "s", "sites": [{"name": SITE}, {"name": "other"}], **tables}
    document.setdefault("statistics", {"covariances": True})["columns"] = list(columns)
    return table(job_file.parse(document))


def rows(units: dict[str, str] | None = None, **columns: Any) -> Rows:
    arrays = {
        name: words_of(np.array(c)) if name == "sex" else np.array(c)
        for name, c in columns.items()
    }
    size = len(next(iter(columns.values())))
    return Rows(columns=arrays, index=np.arange(size), units=units or {})


def warned() -> tuple[list[str], Any]:
    texts = list[str]()
    return texts, texts.append


def test_every_part_moves_by_no_more_than_its_noise_is_made_for():
    """Remove each record of a table of corners, gaps and values beyond bounds."""
    part_of = asked(NUMBERS, SEX, privacy=PRIVATE)
    values = [-2.0, 2.0, 9.0, -1e300, math.inf, math.nan, 0.3]
    grid = np.array(np.meshgrid(values, values)).reshape(2, -1)
    whole = rows(x=grid[0], y=grid[1], sex=np.arange(grid.shape[1]) % 3)

    def sums(data: Rows) -> dict[str, np.ndarray]:
        found = read(part_of, data, SITE, lambda _: None)
        first = sums_of(part_of, part_of.stages[0], found, {})
        second = sums_of(part_of, part_of.stages[1], found, first_sums)
        both = {**first, "fine": second["quantiles"]}
        return {name: np.array(part, np.int64) for name, part in both.items()}

    data = read(part_of, whole, SITE, lambda _: None)
    first_sums = sums_of(part_of, part_of.stages[0], data, {})
    before = sums(whole)
    most = {p.name: p.most for p in part_of.stages[0].parts}
    most["fine"] = part_of.stages[1].parts[1].most
    reached = dict.fromkeys(most, 0)
    for gone in range(len(whole)):
        after = sums(whole.subset(np.delete(np.arange(len(whole)), gone)))
        for name, part in before.items():
            moved = sum(int(d) ** 2 for d in part - after[name])
            assert moved <= most[name], (name, gone)
            reached[name] = max(reached[name], moved)
    # The bound is not loose where a record is in a corner.
    assert reached == {**most, "counts": most["counts"]}


@pytest.mark.parametrize(("times", "fewest", "most"), [(1.0, 0, 1), (0.5, 19, 20)])
def test_the_audit_finds_halved_noise_and_no_other(
    times: float, fewest: int, most: int
):
    """An attack on one record that knows all others, against the curve that is charged.

    Of 20 seeds; noise is what a site adds with a multiplier of 2, or of half of that.
    """
    part_of = asked({**NUMBERS, "quantiles": []}, SEX, privacy=PRIVATE)
    stage, claimed = part_of.stages[0], 2.0
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=50), "y": rng.normal(size=50), "sex": [0, 1] * 25}
    data["x"][0] = data["y"][0] = 2.0
    pair = [
        sums_of(part_of, stage, read(part_of, d, SITE, lambda _: None), {})
        for d in (rows(**data), rows(**{n: c[1:] for n, c in data.items()}))
    ]
    noise = mechanism_of(part_of, stage, times * claimed)
    curve = accountant.trade_off([mechanism_of(part_of, stage, claimed).event()])
    seeds, repeats = 20, 4000
    rng = np.random.default_rng(1)
    is_in = rng.random((seeds, repeats)) < 0.5
    scores = np.zeros((seeds, repeats))
    exact = {n: np.zeros(scores.size * len(pair[0][n]), np.int64) for n in noise.parts}
    for name, drawn in noise.release(exact, rng.bytes).items():
        change = np.array(pair[0][name], float) - np.array(pair[1][name], float)
        shown = drawn.reshape(seeds, repeats, -1) + is_in[..., None] * change
        scores += shown @ change / noise.standard_deviation(name) ** 2
    found = sum(
        independent(curve, *row) < 0.05 for row in zip(scores, is_in, strict=True)
    )
    assert fewest <= found <= most


def test_columns_that_a_site_lacks_are_named_without_a_value():
    """All at once, with the site, the column, the key of the job and what to do."""
    secret = 81.5
    data = rows(
        {"age": "months"},
        age=[secret, 7.25],
        x=np.zeros((2, 2)),
        sex=[0, 1],
    )
    data = Rows(
        columns={
            **data.columns,
            "y": words_of(np.array([3, 4])),
            "cut": np.ones(2) / 3,
        },
        index=data.index,
        units=data.units,
    )
    cut = {"names": ["cut"], "categories": ["0"]}
    gone = {"names": ["weight"], "low": 0.0, "high": 1.0}
    part_of = asked(AGE, NUMBERS, cut, gone)
    with pytest.raises(SiteError) as caught:
        read(part_of, data, SITE, lambda _: None)
    said = caught.value.outside
    for words in (
        "site 'clinic'",
        "'age' in 'months'",
        "'years'",
        "'x' with several values",
        "'y' of text",
        "'cut' of fractions",
        "no column 'weight'",
        "statistics.columns[3]",
    ):
        assert words in said, words
    assert not any(text in said for text in ("81", "7.25", "0.33"))


def test_a_unit_that_data_do_not_state_is_a_warning_at_the_site():
    texts, warn = warned()
    read(asked(AGE), rows({"age": "years"}, age=[1.0, 55.0]), SITE, warn)
    assert texts == []
    read(asked(AGE), rows(age=[1.0, 55.0]), SITE, warn)
    assert "state no unit" in texts[0]


def test_bounds_from_the_data_are_a_warning_at_the_site_alone():
    years = {"age": "years"}
    texts, warn = warned()
    read(asked(AGE), rows(years, age=[0.0, 55.0, math.nan]), SITE, warn)
    (said,) = texts
    assert "low of column 'age'" in said
    assert "must be public" in said
    read(asked(AGE), rows(years, age=[1.0, 55.0]), SITE, warn)
    assert len(texts) == 1


def test_whole_numbers_with_gaps_are_categories():
    for codes in ([0, 1, 1], np.array([0, 1, 1], np.int8), [False, True, True]):
        texts, warn = warned()
        asked_ = asked({"names": ["code"], "categories": ["1", "0"]})
        found = read(asked_, rows(code=codes), SITE, warn)
        assert found.codes["code"].tolist() == [1, 0, 0]
        gaps = np.array([*codes, math.nan], np.float32)
        found = read(asked_, rows(code=gaps), SITE, warn)
        assert found.codes["code"].tolist() == [1, 0, 0, -1]
        assert texts == []
        for odd in (0.5, math.inf):
            with pytest.raises(SiteError, match="'code' of fractions"):
                read(asked_, rows(code=[*codes, odd]), SITE, warn)


def test_categories_that_match_no_value_are_a_warning_at_the_site():
    texts, warn = warned()
    icd = {"names": ["icd"], "categories": ["001", "002"]}
    read(asked(icd), rows(icd=[1.0, 2.0, math.nan]), SITE, warn)
    read(asked({**icd, "names": ["sex"]}), rows(sex=[1, 2]), SITE, warn)
    assert "'icd'" in texts[0]
    assert "leading zeros" in texts[0]
    assert "read as text" in texts[1]
    read(asked({**icd, "categories": ["2"]}), rows(icd=[1, 2]), SITE, warn)
    read(asked(icd), rows(icd=[math.nan]), SITE, warn)
    assert len(texts) == 2


def test_a_site_without_records_adds_nothing():
    part_of = asked(NUMBERS, SEX)
    data = read(part_of, rows(x=[], y=[], sex=np.zeros(0, int)), SITE, lambda _: None)
    sums = dict(sums_of(part_of, part_of.stages[0], data, {}))
    assert sums.pop("sites") == [1]
    assert not any(map(any, sums.values()))
    assert not any(sums_of(part_of, part_of.stages[1], data, sums)["quantiles"])


def test_texts_and_images_have_columns_that_follow_from_them():
    """The deviation of a channel over all pixels is that of its two means."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (30, 3, 5, 4), dtype=np.uint8)
    data = as_dataset((pixels, np.zeros(30, np.int64)), name="images")
    unit = {"low": 0.0, "high": 9.0}
    names = ["inputs.channel.1", "inputs.channel.1.square", "inputs.height"]
    found = read(asked({"names": names, **unit}), data, SITE, lambda _: None).numbers
    mean, square = (np.asarray(found[name]).mean() for name in names[:2])
    assert mean == pytest.approx(pixels[:, 1].mean() / 255)
    assert math.sqrt(square - mean**2) == pytest.approx(pixels[:, 1].std() / 255)
    assert set(np.asarray(found["inputs.height"])) == {5.0}
    with pytest.raises(SiteError, match=r"inputs.channel.3"):
        read(asked({"names": ["inputs.channel.3"], **unit}), data, SITE, print)

    texts = ("No fever, no cough", "FEVER", "feverish")
    note = Words(np.array([0, 1, 2, -1], np.int32), texts)
    table_ = Rows(columns={"note": note}, index=np.arange(4))
    names = ["note.length", "note.has.fever"]
    found = read(asked({"names": names, **unit}), table_, SITE, lambda _: None).numbers
    np.testing.assert_array_equal(found["note.length"], [18, 5, 8, math.nan])
    np.testing.assert_array_equal(found["note.has.fever"], [1, 1, 0, math.nan])


def hidden(least: int = 10, **columns: Any) -> dict[str, list[int]]:
    part_of = asked({**AGE, "bins": 5}, {**SEX, "categories": ["0", "1"]})
    data = read(part_of, rows(**columns), SITE, lambda _: None)
    sums = sums_of(part_of, part_of.stages[0], data, {})
    return {n: list(p) for n, p in hide_small(part_of, sums, data, least, {}).items()}


def test_no_small_cell_is_shown_nor_left_over():
    """Of a subgroup of one, neither its cell nor its difference from the total."""
    ages = [5.0] * 40 + [25.0] * 12 + [45.0] + [95.0] * 20
    found = hidden(age=ages, sex=[0] * 72 + [1])
    # The 1 is hidden, and the 12 with it: 13 records could be either.
    assert found["histograms"] == [40, 0, 0, 0, 20]
    assert found["categories"] == [0, 0, 0]  # All 73: m would be left over.
    enough = hidden(age=ages * 10, sex=[0] * 720 + [1] * 10)
    assert enough["histograms"] == [400, 120, 10, 0, 200]
    assert enough["categories"] == [720, 10, 0]


@pytest.mark.parametrize("seed", range(20))
def test_hidden_cells_are_enough_together(seed: int):
    rng = np.random.default_rng(seed)
    ages = rng.choice([5.0, 25.0, 45.0, 65.0, 95.0], 80, p=rng.dirichlet([0.5] * 5))
    shown = hidden(age=ages, sex=rng.integers(0, 2, 80))["histograms"]
    exact = np.histogram(ages, np.linspace(0, 100, 6))[0].tolist()
    assert all(
        s in {0, e} and not 0 < s < 10 for s, e in zip(shown, exact, strict=True)
    )
    gone = sum(exact) - sum(shown)
    assert gone == 0 or gone >= 10


def test_a_column_of_few_values_and_a_site_of_few_records_say_nothing():
    few = hidden(age=[50.0] * 9 + [math.nan] * 30, sex=[0] * 39)
    assert not any(few["sums"])
    assert not any(few["products"])
    assert few["counts"] == [39, 0, 0, 39, 0, 0]
    alone = hidden(age=[50.0] * 9, sex=[0] * 9)
    assert (alone.pop("sites"), alone.pop("small")) == ([1], [9, 1])
    assert not any(map(any, alone.values()))
    beyond = hidden(age=[120.0] * 9 + [50.0] * 30, sex=[0] * 39)
    assert beyond["counts"][-2:] == [0, 0]


SECRET = 73.25


@pytest.mark.parametrize(
    ("ages", "bounds"),
    [
        # One person is within the bounds, and many are below and above.
        ([10.0] * 40 + [SECRET] + [99.0] * 40, (73.0, 74.0)),
        # All but one are beyond a bound, or have the same value, or are on the grid.
        ([10.0] * 80 + [SECRET], (40.0, 100.0)),
        ([0.0] * 80 + [SECRET], (0.0, 100.0)),
        ([1.0, 2.0, 3.0] * 30 + [SECRET], (0.0, 1e11)),
        ([math.nan] * 30 + [0.0] * 40 + [SECRET] * 3, (-5.0, 200.0)),
    ],
)
def test_bounds_that_single_a_record_out_give_no_sum(
    ages: list[float], bounds: tuple[float, float]
):
    """The job's author knows the value of everybody but one, and chooses bounds."""
    column = {"names": ["age"], "low": bounds[0], "high": bounds[1]}
    part_of = asked(column)
    shown = []
    for value in (SECRET, SECRET + 0.5):
        data = read(
            part_of,
            rows(age=[value if a == SECRET else a for a in ages]),
            SITE,
            lambda _: None,
        )
        exact = sums_of(part_of, part_of.stages[0], data, {})
        shown.append(hide_small(part_of, exact, data, 10, {}))
        assert not any(shown[-1]["sums"])
        assert not any(shown[-1]["squares"])
        assert not any(shown[-1]["products"])
    assert shown[0] == shown[1]


def test_sums_that_differ_by_few_records_are_not_both_shown():
    """Of all values, and of the records without a gap."""
    rng = np.random.default_rng(0)
    numbers = {**NUMBERS, "bins": 0, "quantiles": []}
    for gaps, is_shown in ((0, True), (1, False), (9, False), (10, True)):
        part_of = asked(numbers)
        y = np.concatenate([[math.nan] * gaps, rng.normal(size=80 - gaps)])
        data = read(part_of, rows(x=rng.normal(size=80), y=y), SITE, lambda _: None)
        exact = sums_of(part_of, part_of.stages[0], data, {})
        shown = hide_small(part_of, exact, data, 10, {})
        assert all(shown["sums"][:2])
        assert any(shown["products"]) == any(shown["sums"][2:]) == is_shown, gaps


def test_a_count_beyond_the_bounds_leaves_no_small_cell_beside_it():
    """Those in the first bin, less those below its edge."""
    for beside, is_shown in ((3, False), (0, True), (15, True)):
        ages = [-5.0] * 25 + [1.0] * beside + [50.0, 51.0] * 30
        shown = hidden(age=ages, sex=[0, 1] * 30 + [0] * (25 + beside))
        assert shown["histograms"][0] == 25 + beside
        assert (shown["counts"][4] > 0) == is_shown, beside


def test_moments_of_columns_that_were_answered_exactly_are_known():
    memory, data = InMemory(), rows(age=[5.0, 25.0], sex=[0, 1])
    sites = [{"name": SITE}, {"name": "b"}]
    for columns in ([AGE], [SEX]):
        document = {"name": "s", "sites": sites, "statistics": {"columns": columns}}
        note_question(memory, "d", job_file.parse(document), data, most=2)
    moments = {name: [0.0, 1.0] for name in ("age", "height", "sex")}
    training = {"local_steps": 1, "standardise": "stats:s", "moments": moments}
    job = small_job(training=training)
    assert exact_moments(memory, "d", job) == ["age", "sex"]
    assert exact_moments(memory, "other", job) == []


def exact_job(bins: int = 5, *columns: dict[str, Any]) -> Any:
    document = {"name": f"job-{bins}", "sites": [{"name": SITE}, {"name": "b"}]}
    asked_of = [*(columns or [{**AGE, "bins": bins}])]
    return job_file.parse({**document, "statistics": {"columns": asked_of}})


EXACT = {"age": [5.0, 25.0, 45.0], "sex": [0, 1, 0]}


def test_exact_questions_are_few_and_not_repeated_on_other_data():
    """Overlapping bins and rows that changed are refused; the same is answered."""
    memory = InMemory()

    def ask(bins: int = 5, most: int = 1, dataset: str = "d", **changed: Any) -> None:
        data = rows(**{**EXACT, **changed})
        note_question(memory, dataset, exact_job(bins), data, most=most)

    ask()
    ask()  # A restart, or the same run for other sites: see cohorts.
    ask(sex=[1, 1, 1])  # Not asked about.
    with pytest.raises(JobError, match=r"single records.*exact_questions"):
        ask(bins=6)
    with pytest.raises(JobError, match="records that changed"):
        ask(age=[5.0, 25.0, 46.0])
    with pytest.raises(JobError, match="records that changed"):
        ask(age=[5.0, 25.0], sex=[0, 1])
    ask(bins=6, most=2)
    ask(bins=6)  # Fewer are allowed by now, and this one is known.
    words = exact_job(5, {"names": ["sex.has.1"], "low": 0.0, "high": 1.0})
    note_question(memory, "texts", words, rows(**EXACT), most=1)
    with pytest.raises(JobError, match="records that changed"):
        note_question(memory, "texts", words, rows(sex=[1, 1, 0]), most=1)
    ask(bins=6, dataset="other")


def test_no_other_exact_question_is_answered_once_a_column_has_changed():
    """Whatever its text: a bound that differs by little shows the same difference."""
    memory, sex = InMemory(), exact_job(5, SEX)
    note_question(memory, "d", exact_job(), rows(**EXACT), most=9)
    fewer = {name: values[1:] for name, values in EXACT.items()}
    for job in (exact_job(6), exact_job(5, {**AGE, "high": 100.01}), sex):
        with pytest.raises(JobError, match="records that changed") as caught:
            note_question(memory, "d", job, rows(**fewer), most=9)
        assert not caught.value.remedy  # No number of questions mends it.
    other = {**EXACT, "age": [5.0, 25.0, 44.0]}
    with pytest.raises(JobError, match="'age'"):
        note_question(memory, "d", exact_job(5, SEX, AGE), rows(**other), most=9)
    note_question(memory, "d", sex, rows(**other), most=9)


def test_another_place_of_a_quantile_is_another_question():
    memory, job = InMemory(), exact_job()
    note_question(memory, "d", job, rows(**EXACT), most=1)
    note_places(memory, "d", job, [4, 9], most=1)
    note_places(memory, "d", job, [4, 9], most=1)  # A round that was lost.
    for job_now, places in ((job, [4, 10]), (exact_job(6), [4, 9])):
        with pytest.raises(JobError, match=r"single records.*exact_questions"):
            note_places(memory, "d", job_now, places, most=1)
    note_places(memory, "d", job, [4, 10], most=2)
    with pytest.raises(JobError, match="single records"):
        note_question(memory, "d", exact_job(6), rows(**EXACT), most=2)


def test_a_memory_of_another_form_answers_no_exact_question():
    memory = InMemory()
    old = {"d": {"a" * 64: "b" * 64}}
    memory.update("questions", lambda _: old)
    for most in (1, 9):
        with pytest.raises(CorruptObject, match="another form"):
            note_question(memory, "d", exact_job(), rows(**EXACT), most=most)
    assert memory.read("questions") == old
