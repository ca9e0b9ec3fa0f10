"""Apps of Flower that somebody else wrote, behind a site's seam."""
