"""What a user might write: hooks that the flags of fusionrl take by path. Nothing in fusionrl imports this."""
