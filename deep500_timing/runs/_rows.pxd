# C code of _rows.py. Plain Python never sees this file.
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

cdef enum:
    COLUMNS = 6
    # Of a column: the first time, the base, the width.
    HEAD = 8 + 8 + 1


cdef struct Source:
    # One Part.
    Py_buffer pairs
    Py_buffer labels
    bint has_labels
    int64_t region
    int64_t thread
    int64_t device


cdef struct Steps:
    # A StepTable.
    int64_t* times
    Py_ssize_t count
    int64_t* steps
    int64_t forgotten
    int64_t earliest


cdef struct Key:
    # What the rows are sorted by, and which row it is of.
    int64_t start
    Py_ssize_t row


cdef struct Row:
    int64_t end
    int64_t step
    Source* source


cdef inline Py_ssize_t first_late_in_c(bytes ints, int64_t cut, object future):
    cdef int64_t* pair = <int64_t*><void*>PyBytes_AS_STRING(ints)
    cdef Py_ssize_t count = PyBytes_GET_SIZE(ints) // 16
    cdef Py_ssize_t place
    cdef int64_t last = INT64_MAX if future > INT64_MAX else <int64_t>future
    for place in range(count):
        if cut < pair[2 * place + 1] <= last:
            return place
    return count


cdef inline Py_ssize_t times_before(Steps* table, int64_t time, bint or_at, Py_ssize_t hint) noexcept nogil:
    # How many times are before this one, or at it as well. A row's place is mostly that of the row before.
    cdef int64_t* times = table.times
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = table.count
    cdef Py_ssize_t middle
    # At most `limit` or below: with `or_at`, `times <= time`, else `times < time`.
    cdef Py_ssize_t place = hint
    while place < high and place <= hint + 1:
        if times[place] < time or (or_at and times[place] == time):
            place += 1
        else:
            break
    if place <= hint + 1:
        if place == 0 or times[place - 1] < time or (or_at and times[place - 1] == time):
            return place
        high = place
    else:
        low = place
    while low < high:
        middle = low + (high - low) // 2
        if times[middle] < time or (or_at and times[middle] == time):
            low = middle + 1
        else:
            high = middle
    return low


cdef inline int64_t label(Steps* table, int64_t start, int64_t end, Py_ssize_t* hint) noexcept nogil:
    # As labels_of.
    cdef Py_ssize_t at
    cdef Py_ssize_t by_end = times_before(table, end, False, hint[0])
    hint[0] = by_end
    if table.steps is NULL:
        return table.earliest if by_end == 0 else table.forgotten + by_end
    at = times_before(table, start, True, by_end)
    if at < by_end:
        at = by_end
    return table.earliest if at == 0 else table.steps[at - 1]


cdef inline Py_ssize_t fill_rows(Source* sources, Py_ssize_t count, Steps* table, Key* keys, Row* rows) noexcept nogil:
    # Every row of every part; returns how many of them come before the first that is out of order.
    cdef Py_ssize_t number, place, pairs
    cdef Py_ssize_t row = 0
    cdef Py_ssize_t hint
    cdef int64_t* pair
    for number in range(count):
        pair = <int64_t*>sources[number].pairs.buf
        hint = 0
        pairs = sources[number].pairs.len // 16
        for place in range(pairs):
            keys[row].start = pair[2 * place]
            keys[row].row = row
            rows[row].end = pair[2 * place + 1]
            rows[row].source = &sources[number]
            if sources[number].has_labels:
                rows[row].step = (<int64_t*>sources[number].labels.buf)[place]
            else:
                rows[row].step = label(table, pair[2 * place], pair[2 * place + 1], &hint)
            row += 1
    return row


cdef inline Py_ssize_t run_from(Key* keys, Py_ssize_t first, Py_ssize_t count) noexcept nogil:
    # Where the run of rising keys ends that begins there.
    first += 1
    while first < count and keys[first - 1].start <= keys[first].start:
        first += 1
    return first


cdef inline Key* sorted_keys(Key* keys, Key* other, Py_ssize_t count) noexcept nogil:
    # Runs that rise already are merged two by two until one is left: what each region gave is such a run. Stable.
    cdef Py_ssize_t left, middle, right, a, b, out
    cdef Key* swapped
    while run_from(keys, 0, count) < count:
        left = 0
        while left < count:
            middle = run_from(keys, left, count)
            right = run_from(keys, middle, count) if middle < count else count
            a, b, out = left, middle, left
            while a < middle and b < right:
                if keys[b].start < keys[a].start:
                    other[out] = keys[b]
                    b += 1
                else:
                    other[out] = keys[a]
                    a += 1
                out += 1
            while a < middle:
                other[out] = keys[a]
                a += 1
                out += 1
            while b < right:
                other[out] = keys[b]
                b += 1
                out += 1
            left = right
        swapped = keys
        keys = other
        other = swapped
    return keys


cdef inline uint8_t* put(uint8_t* out, uint64_t value, int width) noexcept nogil:
    # The lowest bytes of a number, the lowest first.
    cdef int place
    for place in range(width):
        out[place] = <uint8_t>(value >> (8 * place))
    return out + width


cdef inline uint8_t* put_planes(uint8_t* out, uint64_t* bits, Py_ssize_t count) noexcept nogil:
    # As _columns._planes.
    cdef uint64_t low = 0
    cdef uint64_t most = 0
    cdef Py_ssize_t place
    cdef int width = 0
    cdef int shift
    if count:
        low = bits[0]
    for place in range(1, count):
        if <int64_t>bits[place] < <int64_t>low:
            low = bits[place]
    for place in range(count):
        most |= bits[place] - low
    while most:
        width += 1
        most >>= 8
    out = put(put(out, low, 8), width, 1)
    for shift in range(0, 8 * width, 8):
        for place in range(count):
            out[place] = <uint8_t>((bits[place] - low) >> shift)
        out += count
    return out


cdef inline uint8_t* put_rows(uint8_t* out, Key* keys, Py_ssize_t count, Row* rows, uint64_t* bits) noexcept nogil:
    # As _columns.pack does with the columns of the table `intervals`.
    cdef Py_ssize_t place
    out = put(out, <uint64_t>keys[0].start, 8)
    for place in range(1, count):
        bits[place - 1] = <uint64_t>keys[place].start - <uint64_t>keys[place - 1].start
    out = put_planes(out, bits, count - 1)
    for place in range(count):
        bits[place] = <uint64_t>rows[keys[place].row].end - <uint64_t>keys[place].start
    out = put_planes(out, bits, count)
    for place in range(count):
        bits[place] = <uint64_t>rows[keys[place].row].step
    out = put_planes(out, bits, count)
    for place in range(count):
        bits[place] = <uint64_t>rows[keys[place].row].source.region
    out = put_planes(out, bits, count)
    for place in range(count):
        bits[place] = <uint64_t>rows[keys[place].row].source.thread
    out = put_planes(out, bits, count)
    for place in range(count):
        bits[place] = <uint64_t>rows[keys[place].row].source.device
    return put_planes(out, bits, count)


cdef struct Packed:
    # The payloads of all frames, one after the other, and where each one ends.
    uint8_t* bytes
    Py_ssize_t* ends


cdef inline int pack_frames(
    Packed* packed, Source* sources, Py_ssize_t count, Steps* table, Py_ssize_t rows_in_all, Py_ssize_t length
) noexcept nogil:
    # Returns -1 where there is not enough memory. What `packed` points to is to be freed in either case.
    cdef Py_ssize_t block = length if length < rows_in_all else rows_in_all
    cdef Py_ssize_t most = COLUMNS * (HEAD + 8 * block)
    cdef Py_ssize_t room = most
    cdef Py_ssize_t used = 0
    cdef Py_ssize_t first = 0
    cdef Py_ssize_t frame = 0
    cdef Py_ssize_t here
    cdef Key* ordered
    cdef uint8_t* larger
    cdef Key* keys = <Key*>malloc(rows_in_all * sizeof(Key))
    cdef Key* other = <Key*>malloc(rows_in_all * sizeof(Key))
    cdef Row* rows = <Row*>malloc(rows_in_all * sizeof(Row))
    cdef uint64_t* bits = <uint64_t*>malloc(block * sizeof(uint64_t))
    packed.bytes = <uint8_t*>malloc(room)
    packed.ends = <Py_ssize_t*>malloc((rows_in_all // length + 1) * sizeof(Py_ssize_t))
    cdef int result = 0
    if (
        keys is NULL or other is NULL or rows is NULL or bits is NULL or packed.bytes is NULL or packed.ends is NULL
    ):
        result = -1
    else:
        fill_rows(sources, count, table, keys, rows)
        ordered = sorted_keys(keys, other, rows_in_all)
        while first < rows_in_all:
            here = length if length < rows_in_all - first else rows_in_all - first
            if room - used < most:
                room = 2 * room
                larger = <uint8_t*>realloc(packed.bytes, room)
                if larger is NULL:
                    result = -1
                    break
                packed.bytes = larger
            used = put_rows(packed.bytes + used, ordered + first, here, rows, bits) - packed.bytes
            packed.ends[frame] = used
            frame += 1
            first += here
    free(keys)
    free(other)
    free(rows)
    free(bits)
    return result


cdef inline list payloads_in_c(
    list parts, object times, object steps, int64_t forgotten, int64_t earliest, Py_ssize_t length
):
    cdef Py_ssize_t count = len(parts)
    cdef Py_ssize_t rows = 0
    cdef Py_ssize_t number, here
    cdef Py_ssize_t begin = 0
    cdef int result
    cdef Py_buffer times_view, steps_view
    cdef Steps table
    cdef Packed packed
    cdef Source* source
    cdef Source* sources = <Source*>calloc(count + 1, sizeof(Source))
    cdef list found = []
    if sources is NULL:
        raise MemoryError()
    memset(&times_view, 0, sizeof(Py_buffer))
    memset(&steps_view, 0, sizeof(Py_buffer))
    memset(&packed, 0, sizeof(Packed))
    try:
        PyObject_GetBuffer(times, &times_view, PyBUF_SIMPLE)
        table.times = <int64_t*>times_view.buf
        table.count = times_view.len // 8
        table.steps = NULL
        table.forgotten = forgotten
        table.earliest = earliest
        if steps is not None:
            PyObject_GetBuffer(steps, &steps_view, PyBUF_SIMPLE)
            table.steps = <int64_t*>steps_view.buf
            if steps_view.len != times_view.len:
                raise ValueError("A table of steps has as many steps as times.")
        for number in range(count):
            source = &sources[number]
            pairs, labels, source.region, source.thread, source.device = parts[number]
            PyObject_GetBuffer(pairs, &source.pairs, PyBUF_SIMPLE)
            rows += source.pairs.len // 16
            if labels is not None:
                source.has_labels = True
                PyObject_GetBuffer(labels, &source.labels, PyBUF_SIMPLE)
                if 2 * source.labels.len != source.pairs.len:
                    raise ValueError("A part has as many steps as intervals.")
        if rows == 0:
            return found
        with nogil:
            result = pack_frames(&packed, sources, count, &table, rows, length)
        if result < 0:
            raise MemoryError()
        for number in range((rows + length - 1) // length):
            here = length if length < rows - number * length else rows - number * length
            found.append(
                (here, PyBytes_FromStringAndSize(<char*>packed.bytes + begin, packed.ends[number] - begin))
            )
            begin = packed.ends[number]
        return found
    finally:
        free(packed.bytes)
        free(packed.ends)
        # One that was never taken is all zero, and releasing it does nothing.
        PyBuffer_Release(&times_view)
        PyBuffer_Release(&steps_view)
        for number in range(count):
            PyBuffer_Release(&sources[number].pairs)
            PyBuffer_Release(&sources[number].labels)
        free(sources)
