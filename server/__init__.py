"""The HTTP shell: application, authentication, life cycle, health, metrics, and the model process behind it."""
