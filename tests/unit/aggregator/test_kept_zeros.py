"""Jobs that start from a pruned model."""

from support import toy


def test_zeros_of_parameters_are_kept_by_the_aggregator():
    """Whatever the sites send; running statistics may leave zero."""
    job = toy.job({"model": {"weights": "w@" + 64 * "0", "keep_zeros": True}})
    state = toy.Toy(job=job).run()  # It begins with zeros alone.
    views = {spec.name: view for spec, view in toy.LAYOUT.float_views(state.weights_d)}
    assert not views["weight"].any()
    assert views["running_mean"].all()
