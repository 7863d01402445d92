"""slime and its fork miles: functions (`api`), import names (`names`), flags, launch scripts."""
