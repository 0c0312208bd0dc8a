/* NCCL between processes of one host, in shared memory: each communicator is a queue with a thread, as on a GPU.

   Small known data (see runtime.c) arrive; all other operations only keep their order. It is an error, which names both, if ranks start different operations. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, SEND, RECEIVE };
static const char *NAMES[] = {"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send", "receive"};
enum { SMALL = 1 << 18, PAIR = 1 << 16, IN_PROGRESS = 7 };
static const int WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

typedef struct { char bytes[128]; } Id;
typedef struct { volatile long arrived; int kind, type, known; long count; char data[SMALL]; } Part; /* one rank's part of an operation */
typedef struct { volatile long sent, taken; long bytes; int known; char data[PAIR]; } Channel;

typedef struct Operation {
  int kind, type, reduction, peer;
  const char *from;
  char *to;
  size_t count;
  Stream *stream;
  Marks after;
  struct Operation *next;
  struct Comm *comm;
  int last; /* last of its group */
} Operation;

typedef struct Comm {
  int size, rank;
  long sequence;
  Part *parts;       /* [2][size] */
  Channel *channels; /* [from][to] */
  Operation *first, *end;
  pthread_mutex_t lock;
  pthread_cond_t came;
  volatile int aborted;
} Comm;

static void pause_until(volatile long *value, long wanted, Comm *comm) {
  for (int spins = 0; *value < wanted && !comm->aborted; spins++)
    if (spins > 100) usleep(spins > 10000 ? 1000 : 20);
  __sync_synchronize();
}

static void add(int type, int reduction, char *sum, const char *part, size_t count) {
#define EACH(T)                                                                                  \
  for (size_t i = 0; i < count; i++) {                                                           \
    T a = ((T *)sum)[i], b = ((const T *)part)[i];                                               \
    ((T *)sum)[i] = reduction == 2 ? (a > b ? a : b) : reduction == 3 ? (a < b ? a : b) : a + b; \
  }
  if (type == 7) EACH(float)
  if (type == 8) EACH(double)
  if (type == 2) EACH(int32_t)
  if (type == 4) EACH(int64_t)
  if (type == 0 || type == 1) EACH(uint8_t)
}

static void collective(Comm *comm, Operation *one) {
  long now = ++comm->sequence;
  Part *parts = comm->parts + (now % 2) * comm->size, *mine = parts + comm->rank;
  int n = comm->size;
  size_t bytes = one->count * WIDTH[one->type];
  size_t given = one->kind == REDUCE_SCATTER || one->kind == ALL_TO_ALL ? bytes * n : bytes;
  int arrives = given <= SMALL;
  mine->kind = one->kind, mine->type = one->type, mine->count = one->count;
  mine->known = arrives && read_device(mine->data, one->from, given);
  __sync_synchronize();
  mine->arrived = now;
  for (int i = 0; i < n; i++) pause_until(&parts[i].arrived, now, comm);
  if (comm->aborted) return;
  for (int i = 0; i < n; i++)
    if (parts[i].kind != one->kind || parts[i].type != one->type || parts[i].count != (long)one->count) {
      fprintf(stderr, "operation %ld of a communicator of %d: rank %d starts %s of %ld (type %d), rank %d %s of %ld (type %d)\n", now,
              n, comm->rank, NAMES[one->kind], (long)one->count, one->type, i, NAMES[parts[i].kind], parts[i].count, parts[i].type);
      abort();
    }
  int all = 1;
  for (int i = 0; i < n; i++) all &= parts[i].known || (one->kind == BROADCAST && i != one->peer);
  if (!all) return;
  size_t made = one->kind == ALL_GATHER || one->kind == ALL_TO_ALL ? bytes * n : bytes;
  char *result = malloc(made + 1);
  if (one->kind == BROADCAST) memcpy(result, parts[one->peer].data, bytes);
  for (int i = 0; i < n; i++) {
    const char *part = parts[i].data + (one->kind == REDUCE_SCATTER || one->kind == ALL_TO_ALL ? comm->rank * bytes : 0);
    if (one->kind == ALL_GATHER || one->kind == ALL_TO_ALL) memcpy(result + i * bytes, part, bytes);
    else if (one->kind != BROADCAST && i == 0) memcpy(result, part, bytes);
    else if (one->kind != BROADCAST) add(one->type, one->reduction, result, part, one->count);
  }
  know(one->to, made, result);
  free(result);
}

static void message(Comm *comm, Operation *one, int round) {
  size_t bytes = one->count * WIDTH[one->type];
  int sends = one->kind == SEND;
  Channel *channel = comm->channels + (sends ? comm->rank * comm->size + one->peer : one->peer * comm->size + comm->rank);
  if (sends && round == 0) {
    channel->bytes = bytes;
    channel->known = bytes <= PAIR && read_device(channel->data, one->from, bytes);
    __sync_synchronize();
    channel->sent++;
  }
  if (!sends && round == 1) {
    pause_until(&channel->sent, channel->taken + 1, comm);
    if (comm->aborted) return;
    if (channel->bytes != (long)bytes) {
      fprintf(stderr, "rank %d of a communicator expects %zu bytes from %d, which sends %ld\n", comm->rank, bytes, one->peer, channel->bytes);
      abort();
    }
    if (channel->known) know(one->to, bytes, channel->data);
    __sync_synchronize();
    channel->taken++;
  }
  if (sends && round == 2) pause_until(&channel->taken, channel->sent, comm);
}

static void finished(Operation *one) {
  pthread_mutex_lock(&progress);
  one->stream->done++;
  pthread_cond_broadcast(&progressed);
  pthread_mutex_unlock(&progress);
  free(one);
}

static void *work(void *argument) {
  Comm *comm = argument;
  for (;;) {
    Operation *group[4096];
    int count = 0;
    pthread_mutex_lock(&comm->lock);
    while (!comm->first) pthread_cond_wait(&comm->came, &comm->lock);
    do {
      group[count] = comm->first;
      comm->first = comm->first->next;
    } while (!group[count++]->last);
    if (!comm->first) comm->end = NULL;
    pthread_mutex_unlock(&comm->lock);
    for (int i = 0; i < count; i++) {
      pthread_mutex_lock(&progress);
      while (!reached(&group[i]->after) && !comm->aborted) pthread_cond_wait(&progressed, &progress);
      pthread_mutex_unlock(&progress);
    }
    for (int i = 0; i < count; i++)
      if (group[i]->kind < SEND) collective(comm, group[i]);
    for (int round = 0; round < 3; round++)
      for (int i = 0; i < count; i++)
        if (group[i]->kind >= SEND) message(comm, group[i], round);
    for (int i = 0; i < count; i++) finished(group[i]);
  }
  return NULL;
}

/* ---- groups of operations start together */

static __thread int depth;
static __thread Operation *grouped, *group_end;

static void submit(Operation *first) {
  while (first) { /* operations of one communicator stay together */
    Comm *comm = first->comm;
    Operation *rest = NULL, **rest_end = &rest, *mine = NULL, **mine_end = &mine, *last = NULL;
    for (Operation *one = first, *next; one; one = next) {
      next = one->next, one->next = NULL;
      if (one->comm == comm) *mine_end = last = one, mine_end = &one->next;
      else *rest_end = one, rest_end = &one->next;
    }
    last->last = 1;
    pthread_mutex_lock(&comm->lock);
    if (comm->end) comm->end->next = mine;
    else comm->first = mine;
    comm->end = last;
    pthread_cond_signal(&comm->came);
    pthread_mutex_unlock(&comm->lock);
    first = rest;
  }
}

static int start(int kind, const void *from, void *to, size_t count, int type, int reduction, int peer, Comm *comm, void *stream) {
  Operation *one = calloc(1, sizeof *one);
  *one = (Operation){kind, type, reduction, peer, from, to, count, stream_of(stream)};
  one->comm = comm;
  pthread_mutex_lock(&progress);
  marks_of(one->stream, &one->after);
  pthread_mutex_unlock(&progress);
  if (group_end) group_end->next = one;
  else grouped = one;
  group_end = one;
  if (depth == 0) {
    pthread_mutex_lock(&progress);
    one->stream->enqueued++;
    pthread_mutex_unlock(&progress);
    submit(one);
    grouped = group_end = NULL;
  }
  return 0;
}

API int ncclGroupStart(void) { depth++; return 0; }
API int ncclGroupEnd(void) {
  if (--depth == 0 && grouped) {
    pthread_mutex_lock(&progress);
    for (Operation *one = grouped; one; one = one->next) one->stream->enqueued++;
    pthread_mutex_unlock(&progress);
    Operation *first = grouped;
    grouped = group_end = NULL;
    submit(first);
  }
  return 0;
}
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
  return start(ALL_REDUCE, from, to, count, type, op, 0, comm, stream);
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *comm, void *stream) {
  return start(ALL_REDUCE, from, to, count, type, op, 0, comm, stream);
}
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
  return start(REDUCE_SCATTER, from, to, count, type, op, 0, comm, stream);
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  return start(ALL_GATHER, from, to, count, type, 0, 0, comm, stream);
}
API int ncclAlltoAll(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  return start(ALL_TO_ALL, from, to, count, type, 0, 0, comm, stream);
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
  return start(BROADCAST, from, to, count, type, 0, root, comm, stream);
}
API int ncclBcast(void *buffer, size_t count, int type, int root, Comm *comm, void *stream) {
  return start(BROADCAST, buffer, buffer, count, type, 0, root, comm, stream);
}
API int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
  return start(SEND, from, NULL, count, type, 0, peer, comm, stream);
}
API int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
  return start(RECEIVE, NULL, to, count, type, 0, peer, comm, stream);
}

/* ---- communicators */

API int ncclGetVersion(int *version) { *version = 22809; return 0; }
API int ncclGetUniqueId(Id *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "/megalite-rehearsal-%d-%lx", getpid(), (long)random() ^ (long)time(NULL) << 20);
  return 0;
}
static long limited;
/* Number of this process's communicators with a limit of thread blocks per kernel. */
API long rehearsal_limited(void) { return limited; }
API int ncclCommInitRankConfig(Comm **made, int size, Id id, int rank, void *config) {
  if (config && ((int *)config)[7] != (-2147483647 - 1)) limited++; /* maxCTAs is set; it follows a size and five numbers */
  size_t parts = 2 * size * sizeof(Part), channels = (size_t)size * size * sizeof(Channel), header = 4096;
  int file = shm_open(id.bytes, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, header + parts + channels)) return 2;
  char *memory = mmap(NULL, header + parts + channels, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  Comm *comm = calloc(1, sizeof *comm);
  comm->size = size, comm->rank = rank, comm->parts = (Part *)(memory + header), comm->channels = (Channel *)(memory + header + parts);
  pthread_mutex_init(&comm->lock, NULL), pthread_cond_init(&comm->came, NULL);
  long joined = __sync_add_and_fetch((long *)memory, 1);
  (void)joined;
  pause_until((volatile long *)memory, size, comm);
  shm_unlink(id.bytes);
  pthread_t thread;
  pthread_create(&thread, NULL, work, comm);
  *made = comm;
  return 0;
}
API int ncclCommInitRank(Comm **made, int size, Id id, int rank) { return ncclCommInitRankConfig(made, size, id, rank, NULL); }
API int ncclCommInitRankScalable(Comm **made, int size, int rank, int count, Id *ids, void *config) {
  return ncclCommInitRankConfig(made, size, ids[0], rank, config);
}
API int ncclCommCount(Comm *comm, int *count) { *count = comm->size; return 0; }
API int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return 0; }
API int ncclCommGetAsyncError(Comm *comm, int *error) { *error = 0; return 0; }
API int ncclCommAbort(Comm *comm) {
  comm->aborted = 1;
  pthread_mutex_lock(&progress);
  pthread_cond_broadcast(&progressed);
  pthread_mutex_unlock(&progress);
  return 0;
}
API const char *ncclGetErrorString(int error) { return error ? "unhandled system error" : "no error"; }
API const char *ncclGetLastError(Comm *comm) { return ""; }
DONE(ncclCommDestroy) DONE(ncclCommFinalize) DONE(ncclCommRegister) DONE(ncclCommDeregister) DONE(ncclRedOpDestroy)
API int ncclMemAlloc(void **address, size_t size) { extern int cudaMalloc(void **, size_t); return cudaMalloc(address, size); }
API int ncclMemFree(void *address) { extern int cudaFree(void *); return cudaFree(address); }
