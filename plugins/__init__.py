"""What a user might write: hooks that fusionrl's flags take by path. Nothing in fusionrl imports this."""
