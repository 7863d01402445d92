"""slime's flags, how they translate, and where slime's defaults differ. Pure."""
