"""Examples of functions that a user writes; fusionrl's flags take them by path. fusionrl imports none of them."""
