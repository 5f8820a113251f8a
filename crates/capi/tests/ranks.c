// One of two ranks: sums, gathers, sends, and calls that must fail.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "paceline.h"

static void must(PacelineStatus got, PacelineStatus expected, const char *what) {
  if (got != expected) {
    printf("%s: status %d, expected %d: %s\n", what, (int)got, (int)expected, paceline_last_error());
    exit(1);
  }
}

static void check(int holds, const char *what) {
  if (!holds) {
    printf("wrong: %s\n", what);
    exit(1);
  }
}

int main(int argc, char **argv) {
  check(argc == 4, "usage: ranks RANK ADDR ADDR");
  uint32_t rank = (uint32_t)atoi(argv[1]);
  const char *addrs[] = {argv[2], argv[3]};
  PacelineGroup *group = NULL;
  must(paceline_group_join(rank, 2, addrs, NULL, 60, &group), PACELINE_STATUS_OK, "join");
  check(paceline_group_rank(group) == rank && paceline_group_size(group) == 2, "rank and size");

  float sums[1000];
  for (int i = 0; i < 1000; i++) sums[i] = (float)i * (rank + 1);
  must(paceline_all_reduce(group, (uint8_t *)sums, 1000, PACELINE_DTYPE_F32, PACELINE_REDUCE_SUM, 60),
       PACELINE_STATUS_OK, "all_reduce");
  for (int i = 0; i < 1000; i++) check(sums[i] == (float)(3 * i), "sum");

  int64_t own[2] = {rank, 10 + rank}, all[4] = {0};
  must(paceline_all_gather(group, (uint8_t *)own, (uint8_t *)all, 2, PACELINE_DTYPE_I64, 60),
       PACELINE_STATUS_OK, "all_gather");
  check(all[0] == 0 && all[1] == 10 && all[2] == 1 && all[3] == 11, "gathered");

  double word = rank == 1 ? 2.5 : 0;
  must(paceline_broadcast(group, (uint8_t *)&word, 1, PACELINE_DTYPE_F64, 1, 60), PACELINE_STATUS_OK,
       "broadcast");
  check(word == 2.5, "broadcast");

  int32_t message = 77 + (int32_t)rank, got = 0;
  if (rank == 0) {
    must(paceline_send(group, (uint8_t *)&message, 1, PACELINE_DTYPE_I32, 1, 5, 60), PACELINE_STATUS_OK, "send");
  } else {
    must(paceline_recv(group, (uint8_t *)&got, 1, PACELINE_DTYPE_I32, 0, 5, 60), PACELINE_STATUS_OK, "recv");
    check(got == 77, "message");
  }
  must(paceline_barrier(group, 60), PACELINE_STATUS_OK, "barrier");

  must(paceline_all_reduce(group, (uint8_t *)sums, 1, 99, PACELINE_REDUCE_SUM, 60),
       PACELINE_STATUS_INVALID, "a type that is none");
  check(strstr(paceline_last_error(), "99") != NULL, "the error names it");
  must(paceline_barrier(NULL, 1), PACELINE_STATUS_INVALID, "no group");
  if (rank == 0) {
    must(paceline_recv(group, (uint8_t *)&got, 1, PACELINE_DTYPE_I32, 1, 9, 0.2), PACELINE_STATUS_TIMEOUT,
         "nothing comes");
  } else {
    must(paceline_recv(group, (uint8_t *)&got, 1, PACELINE_DTYPE_I32, 0, 9, 60), PACELINE_STATUS_TIMEOUT,
         "the group has failed, for the same reason");
  }
  paceline_group_free(group);
  printf("all right\n");
  return 0;
}
