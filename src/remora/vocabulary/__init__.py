"""Words every layer shares: identities and message types. Imports nothing of ours."""
