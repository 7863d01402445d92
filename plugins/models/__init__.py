"""Model families of your own: one file each, as those in fusionrl/weights/families (docs/models.md)."""
