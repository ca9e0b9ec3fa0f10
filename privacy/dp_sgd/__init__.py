"""DP-SGD at a site: adapted models, and clipped sums of per-record gradients.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy",
arXiv:1607.00133, Algorithm 1. The noise is in ``privacy.dp.mechanism``, the draw of
the batch in ``privacy.dp.poisson``, the loop in ``clients.training.private_steps``.
"""
