"""The page of `reshard view`: one HTML file that shows a checkpoint, made from headers and strategies.

`data` and `moves` collect what the page shows of `inspection.subject`, `page` writes it. `page.js` and
`page.css` are the script and the style of the page; it loads nothing else.
"""
