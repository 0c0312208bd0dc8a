#!/bin/bash
# Joins the parts of corpus-*-of-00008 into corpus_text_document: the bytes of one machine. It checks that all are there.
OUTPUT=${OUTPUT:-data/corpus}
PARTS=${PARTS:-8}

exec megalite data merge --output-prefix "${OUTPUT}_text_document" \
    --input "$OUTPUT"-*-of-"$(printf %05d "$PARTS")"_text_document.idx
