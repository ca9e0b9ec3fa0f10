"""Running statistics beside a codec of few bits."""

import numpy as np
from support import toy

from federation.compression.apart import Apart, fitted
from federation.compression.choice import codec_of
from federation.compression.codec import Links, decoded
from federation.messages import RoundTask
from federation.vectors import Layout, Role

LAYOUT = Layout.build(
    [
        ("w", (2, 3), "float32", Role.PARAMETER),
        ("mean", (4,), "float32", Role.BUFFER),
        ("seen", (), "int64", Role.MAX),
        ("variance", (4,), "float32", Role.BUFFER),
        ("v", (5,), "float32", Role.PARAMETER),
        ("empty", (0,), "float32", Role.BUFFER),
        ("last", (), "float32", Role.BUFFER),
    ]
)


def test_running_statistics_are_found_and_joined():
    """Integers lie elsewhere; what has no value needs no place."""
    links = fitted(Links(up=codec_of("int4"), down=codec_of("top_k")), LAYOUT)
    for codec in (links.up, links.down):
        assert isinstance(codec, Apart)
        assert codec.spans == ((6, 14), (19, 20))


def test_codecs_that_keep_every_value_stay_as_they_are():
    """So do all codecs of a model without running statistics."""
    links = Links(up=codec_of("bf16"), down=codec_of("identity"), feedback=1.0)
    assert fitted(links, LAYOUT) == links
    plain = Layout.build([("w", (2,), "float32", Role.PARAMETER)])
    few = Links(up=codec_of("int4"))
    assert fitted(few, plain) is few


def test_a_small_variance_arrives_unchanged_beside_large_values():
    """A grid of the block's largest value would make it negative or 0."""
    delta_d = np.full(LAYOUT.size, 50, np.float32)
    delta_d[10:14] = -1e-3
    whole = codec_of("int4")
    assert decoded(whole, whole.encode(delta_d), LAYOUT.size)[10] == 0
    codec = fitted(Links(up=whole), LAYOUT).up
    found_d = decoded(codec, codec.encode(delta_d), LAYOUT.size)
    assert found_d[6:14].tobytes() == delta_d[6:14].tobytes()
    assert found_d[19] == 50


def test_a_run_brings_running_statistics_whole():
    """Those of the toy are the mean of its sites', whatever the codec."""
    final = [
        toy.Toy(job=toy.job({"communication": {"codec": codec}})).run()
        for codec in ({"name": "identity"}, {"name": "top_k", "fraction": 0.01})
    ]
    (buffer,) = (t for t in toy.LAYOUT.tensors if t.role is Role.BUFFER)
    place = slice(buffer.offset, buffer.offset + buffer.size)
    np.testing.assert_allclose(
        final[0].weights_d[place], final[1].weights_d[place], atol=1e-5
    )
    assert np.abs(final[0].weights_d - final[1].weights_d).max() > 0.1


def test_a_task_names_what_counted_only_if_sites_need_it():
    """Its bytes are those of earlier releases otherwise."""
    assert RoundTask.__dataclass_fields__["counted"].default == 0
    for name, expected in (("bf16", {}), ("int8", dict.fromkeys(toy.SITES, 3))):
        job = toy.job({"communication": {"codec": {"name": name}}})
        assert toy.Toy(job=job).run().counted == expected
