"""Model families of your own: one file each, as those in fusionrl/sync/families (docs/models.md)."""
