"""Names on the axes of figures."""

from monitoring.pages.figures import cut_names


def test_names_of_columns_keep_the_letters_that_the_font_has():
    names = ["größe_cm", "gro\u0308ße", "возраст", "年齢", "a\nb", "x" * 30]
    assert cut_names(names, limit=10) == [
        *("größe_cm", "größe", "возраст", "??", "a?b", "xxxxxxx..."),
    ]
