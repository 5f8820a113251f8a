// Prints a model's greedy answer to a question.

#include <stdio.h>
#include <stdlib.h>

#include "paceline.h"

static bool print(const char *text, void *user) {
  *(int *)user += 1;
  fputs(text, stdout);
  return true;
}

static bool refuse(const char *text, void *user) {
  (void)text;
  (void)user;
  return false;
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  PacelineModel *model = NULL;
  if (paceline_model_open("/nowhere.gguf", 1, 0, &model) == PACELINE_STATUS_OK) return 3;
  if (paceline_model_open(argv[1], 2, 512, &model) != PACELINE_STATUS_OK) {
    fprintf(stderr, "%s\n", paceline_last_error());
    return 1;
  }
  PacelineOptions options = {.max_tokens = 24};
  int pieces = 0;
  if (paceline_generate(model, argv[2], &options, refuse, NULL) != PACELINE_STATUS_CANCELLED) return 4;
  if (paceline_generate(model, argv[2], &options, print, &pieces) != PACELINE_STATUS_OK) {
    fprintf(stderr, "%s\n", paceline_last_error());
    return 1;
  }
  printf("\n");
  paceline_model_free(model);
  return pieces > 1 ? 0 : 5;
}
