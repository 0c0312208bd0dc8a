/* Shared by runtime.c and nccl.c: streams and the marks that they wait for. */

#include <pthread.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define DONE(name) API int name(void) { return 0; }

enum { MARKS = 64, KNOWN = 1 << 20 };
typedef struct Stream Stream;
typedef struct { int count; Stream *on[MARKS]; long ticket[MARKS]; } Marks; /* reached when each stream has finished that many operations */
struct Stream { long enqueued, done; Marks waits; };

extern pthread_mutex_t progress; /* of all streams */
extern pthread_cond_t progressed;
Stream *stream_of(void *handle);
void marks_of(Stream *stream, Marks *marks); /* what is enqueued now; the caller holds `progress` */
int reached(const Marks *marks);
void know(const void *at, size_t size, const void *data); /* valid until the next kernel; at most KNOWN bytes */
int read_device(void *to, const void *from, size_t size); /* returns 0, and writes zeros, if contents are not known */
