"""Web pages that show a group: a server on this host that asks the workers as an observer, and one page for the browser.

`server` answers requests, `guard` decides which, `sampler` asks the workers while a page is open, `history` remembers the
last minutes, `pages` makes of a snapshot what one page shows. Nothing here changes anything on a worker.
"""
