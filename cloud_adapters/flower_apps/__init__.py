"""Existing Flower apps, behind a site's seam."""
