from hypothesis import settings

# Time limits of single examples measure the machine's other load.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
