"""Building blocks of HTML pages and pictures, for all parts of the library that draw.

They serve reports, compiled steps, stages, simulated steps, tensors and models.

```
pages      the frame of a page, its tables, bars and timeline    style, script: CSS, JavaScript
pictures   boxes, lines and words, as SVG or PNG, and colours
words      short texts of places, layouts and times
source     the functions of a program's files
traces     files that Perfetto opens
```
"""
